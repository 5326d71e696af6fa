"""Prompts from rows, and the cursor that hands them out in seeded, resumable order."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gspo.data.chat import Rendering, render_prompt
from gspo.data.contents import comparable, prompt_content
from gspo.data.datasets import Row, column, read_rows
from gspo.errors import DataError
from gspo.seeding import derive_seed
from gspo.types import Message, Prompt

#: Columns of generated rows that describe the row and are not columns of the data.
_ROW_FIELDS = ("id", "task")


def load_prompts(
    path: str | Path | None = None,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    tokenizer: Any,
    num_prompts: int | None = None,
    seed: int = 0,
    prompt_column: str = "prompt",
    system_prompt: str | None = None,
    instruction: str | None = None,
    chat_template: Literal["auto", "always", "never"] = "auto",
    template_options: Mapping[str, Any] | None = None,
    max_prompt_tokens: int | None = None,
    required_columns: Sequence[str] = (),
    without: Collection[str | tuple[Message, ...]] = (),
) -> list[Prompt]:
    """Prompts of a file, or of a generated task's rows.

    Args:
        path: a data file or directory; exactly one of ``path`` and ``rows``.
        rows: dictionaries with ``id``, ``task``, the prompt and free columns, as generated tasks give them.
        num_prompts: how many; a seeded choice in file order if the file has more.
        seed: of that choice.
        max_prompt_tokens: a longer prompt is refused.
        required_columns: columns that every row must have, such as the gold answer.
        without: contents of held-out prompts; rows that differ from one in layout only are left out before the choice.

    Raises:
        DataError: a row that cannot be a prompt, named by file and line; or nothing is left.
    """
    if (path is None) == (rows is None):
        raise DataError("prompts need exactly one source, a path or a task")
    table = read_rows(path) if path is not None else [_generated(row) for row in rows or ()]
    held_out = {comparable(content) for content in without}
    if held_out:
        table = [row for row in table if comparable(row.values.get(prompt_column)) not in held_out]
        if not table:
            raise DataError(f"{path}: every row is held out for evaluation; lower data.eval.num_prompts")
    table = choose(table, num_prompts, seed, str(path) if path is not None else "the task")
    rendering = Rendering(chat_template, system_prompt, instruction, template_options or {})
    prompts = [
        make_prompt(row, tokenizer, rendering, prompt_column, max_prompt_tokens, required_columns) for row in table
    ]
    _refuse_repeated_ids(prompts)
    return prompts


def _generated(row: Mapping[str, Any]) -> Row:
    return Row(str(row["id"]), row)


def choose(rows: Sequence[Row], num_rows: int | None, seed: int, source: str) -> list[Row]:
    """All rows, or a seeded choice of ``num_rows`` of them in their order.

    Raises:
        DataError: there are fewer.
    """
    if num_rows is None or num_rows == len(rows):
        return list(rows)
    if num_rows > len(rows):
        raise DataError(f"{source} has {len(rows)} rows, fewer than the {num_rows} asked for (num_prompts)")
    chosen = random.Random(derive_seed(seed, "choice of rows")).sample(range(len(rows)), num_rows)
    return [rows[index] for index in sorted(chosen)]


def make_prompt(
    row: Row,
    tokenizer: Any,
    rendering: Rendering,
    prompt_column: str = "prompt",
    max_prompt_tokens: int | None = None,
    required_columns: Sequence[str] = (),
) -> Prompt:
    """One prompt of one row; every other column travels with it to the reward."""
    content = prompt_content(column(row, prompt_column), row.place, prompt_column)
    for name in required_columns:
        column(row, name)
    token_ids = render_prompt(tokenizer, content, rendering, row.place)
    if max_prompt_tokens is not None and len(token_ids) > max_prompt_tokens:
        raise DataError(
            f"{row.place}: the prompt has {len(token_ids)} tokens, more than the limit of {max_prompt_tokens}; "
            "shorten it, or raise max_prompt_tokens if the model's context allows"
        )
    generated = "task" in row.values and row.values.get("id") == row.place
    task = str(row.values["task"]) if generated else ""
    left_out = {prompt_column, *(_ROW_FIELDS if generated else ())}
    columns = {name: value for name, value in row.values.items() if name not in left_out}
    return Prompt(id=row.place, content=content, token_ids=token_ids, task=task, columns=columns)


def _refuse_repeated_ids(prompts: Sequence[Prompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise DataError(f"two prompts have the id {prompt.id!r}; ids must be unique")
        seen.add(prompt.id)


class PromptCursor:
    """Hands out prompts without end: epoch after epoch, each in its own seeded order.

    What is left at the end of an epoch opens the next batch, so that every prompt is used once per epoch. In a batch
    that spans two epochs the prompts it already holds are put off to the later places of the new epoch; only a batch
    larger than the whole data holds a prompt twice (two draws are then two groups).

    >>> cursor = PromptCursor([Prompt(str(i), str(i), (i,)) for i in range(3)], seed=0)
    >>> sorted(p.id for p in cursor.next(3))
    ['0', '1', '2']
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int = 0) -> None:
        if not prompts:
            raise DataError("there are no prompts to draw from")
        self.prompts = tuple(prompts)
        self.seed = seed
        self._epoch = 0
        self._queue = self._order(0)

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        random.Random(derive_seed(self.seed, "prompts", epoch)).shuffle(order)
        return order

    @property
    def epoch(self) -> int:
        """Epochs begun, from 0."""
        return self._epoch

    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts."""
        batch: list[int] = []
        while len(batch) < n:
            if not self._queue:
                self._begin_epoch(held=set(batch[len(batch) // len(self.prompts) * len(self.prompts) :]))
            take = min(n - len(batch), len(self._queue))
            batch += self._queue[:take]
            self._queue = self._queue[take:]
        return [self.prompts[index] for index in batch]

    def _begin_epoch(self, held: set[int]) -> None:
        """The order of the next epoch, prompts that the open batch holds moved to its end."""
        self._epoch += 1
        order = self._order(self._epoch)
        self._queue = [i for i in order if i not in held] + [i for i in order if i in held]

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs, as JSON can carry it."""
        return {"seed": self.seed, "epoch": self._epoch, "queue": list(self._queue), "num_prompts": len(self.prompts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position.

        Raises:
            DataError: the state belongs to other data or another seed.
        """
        if state["num_prompts"] != len(self.prompts) or state["seed"] != self.seed:
            raise DataError(
                f"the saved position is of {state['num_prompts']} prompts with seed {state['seed']}, "
                f"but there are {len(self.prompts)} with seed {self.seed}; continue with the same data"
            )
        self._epoch = int(state["epoch"])
        self._queue = [int(index) for index in state["queue"]]
