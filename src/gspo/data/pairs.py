"""Prompt and response pairs for the cold start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gspo.data.chat import Rendering, closing_ids, encode, is_templated
from gspo.data.datasets import Row, column, read_rows
from gspo.data.prompts import make_prompt
from gspo.errors import DataError
from gspo.types import Prompt

Pair = tuple[Prompt, tuple[int, ...]]


def load_pairs(
    path: str | Path | None = None,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    tokenizer: Any,
    prompt_column: str = "prompt",
    response_column: str = "response",
    system_prompt: str | None = None,
    instruction: str | None = None,
    chat_template: Literal["auto", "always", "never"] = "auto",
    template_options: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> list[Pair]:
    """(prompt, response ids) of a file or of a generated task's rows.

    The response is closed by the template's end-of-turn token, or by end-of-text for prompts without a template, so
    that the model learns to stop.

    Args:
        max_tokens: prompt and response together; a longer pair is refused.

    Raises:
        DataError: a row that is not a pair, named by file and line.
    """
    if (path is None) == (rows is None):
        raise DataError("pairs need exactly one source, a path or a task")
    table = read_rows(path) if path is not None else [Row(str(row["id"]), row) for row in rows or ()]
    rendering = Rendering(chat_template, system_prompt, instruction, template_options or {})
    ends: dict[bool, tuple[int, ...]] = {}
    pairs = []
    for row in table:
        prompt = make_prompt(row, tokenizer, rendering, prompt_column)
        chat = is_templated(tokenizer, prompt.content, rendering)
        if chat not in ends:
            ends[chat] = closing_ids(tokenizer, chat)
        pairs.append((prompt, _response_ids(row, response_column, tokenizer, ends[chat])))
        _check_length(row, pairs[-1], max_tokens)
    return pairs


def _response_ids(row: Row, name: str, tokenizer: Any, end: tuple[int, ...]) -> tuple[int, ...]:
    value = column(row, name)
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0].get("content")  # a chat message
    if not isinstance(value, str) or not value:
        raise DataError(f"{row.place}: the column {name!r} is not a response but {value!r:.80}")
    ids = encode(tokenizer, value)
    return ids if ids[-len(end) :] == end else (*ids, *end)


def _check_length(row: Row, pair: Pair, max_tokens: int | None) -> None:
    length = len(pair[0].token_ids) + len(pair[1])
    if max_tokens is not None and length > max_tokens:
        raise DataError(f"{row.place}: prompt and response have {length} tokens, more than the limit of {max_tokens}")
