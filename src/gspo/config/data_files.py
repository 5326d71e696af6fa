"""Everything that is wrong with the data that a recipe names, before anything is loaded: no torch, no model.

Each finding is about a key of the recipe; its message begins with the file and the line (the row, in Parquet).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from gspo.config.batch import plan_batch
from gspo.config.check import has_held_out, num_prompts, same_file
from gspo.config.findings import Command, Finding
from gspo.config.model_files import context_length, prompt_limit, token_counter
from gspo.config.schema import DataConfig, Recipe
from gspo.data.contents import comparable, prompt_content
from gspo.data.datasets import Row, column, scan_rows
from gspo.envs.tasks import make_task
from gspo.errors import ConfigError, DataError, InputError, ModelError
from gspo.rewards.gold import VERIFIERS, gold_of, problem_defaults, rejected_golds
from gspo.rewards.problems import read_problem

#: Faults of one kind in one file that are written out; the others are counted.
MAX_NAMED: Final = 8
#: Gold answers that a verifier is tried on, spread over the file; sympy is slow.
MAX_JUDGED: Final[Mapping[str, int]] = {"exact_match": 2000, "number": 2000, "math": 200}
#: Prompts whose tokens are counted: the longest ones.
MAX_COUNTED: Final = 100
#: Problems of a task that are made to see how many different ones there are.
MAX_GENERATED: Final = 5000


def data_findings(recipe: Recipe, command: Command) -> list[Finding]:
    """All faults of the recipe's files and tasks; what cannot be opened is reported once, as its own fault."""
    tables = _Tables()
    needs_prompts = command != "sft" or (recipe.sft is not None and recipe.sft.stop_at_pass is not None)
    findings: list[Finding] = []
    if needs_prompts:
        findings += _prompt_findings(recipe, "data", recipe.data, tables)
        if recipe.data.eval is not None:
            findings += _prompt_findings(recipe, "data.eval", recipe.data.eval, tables)
        findings += _size_findings(recipe, tables)
        findings += _script_findings(recipe, tables)
    if recipe.sft is not None and command != "eval":
        findings += _pair_findings(recipe, tables)
    if has_held_out(recipe):
        findings += _overlaps(recipe, tables)
    return findings


@dataclass
class _Tables:
    """Files as they were read, each once."""

    rows: dict[str, list[Row]] = field(default_factory=dict)

    def read(self, path: str, key: str) -> tuple[list[Row], list[Finding]]:
        """The rows that can be read, and the faults; none the second time, nor of a file that is not there."""
        if path in self.rows:
            return self.rows[path], []
        self.rows[path] = []
        if not Path(path).exists():  # said by check_files
            return [], []
        try:
            self.rows[path], faults = scan_rows(path)
        except InputError as error:
            return [], [Finding("error", key, str(error))]
        return self.rows[path], list(_named(key, faults))


def _named(key: str, faults: Sequence[str], *related: str) -> Iterator[Finding]:
    """One finding for each of the first faults, and one that counts the others."""
    for fault in faults[:MAX_NAMED]:
        yield Finding("error", key, fault, related)
    if len(faults) > MAX_NAMED:
        yield Finding("error", key, f"... and {len(faults) - MAX_NAMED} more like the last", related)


# Prompts.


def _prompt_findings(recipe: Recipe, key: str, data: DataConfig, tables: _Tables) -> Iterator[Finding]:
    if data.task is not None and data.path is None:
        yield from _task_findings(recipe, key, data)
    if data.path is None or data.task is not None:
        return
    source = f"{key}.path"
    seen = data.path in tables.rows
    rows, faults = tables.read(data.path, source)
    yield from faults
    if not rows:
        return
    if absent := _absent(rows, data.prompt_column):
        yield Finding("error", f"{key}.prompt_column", f"{data.path} {absent}", (source,))
    elif not (seen and data.prompt_column == recipe.data.prompt_column):
        contents, faulty = _contents(rows, data.prompt_column)
        yield from _named(source, faulty, f"{key}.prompt_column")
        yield from _named(source, _too_long(recipe, data, contents), f"{key}.max_prompt_tokens", "model.tiny_config")
    if not seen:
        yield from _named(source, _repeated_ids(rows))
        yield from _gold_findings(recipe, source, data.path, rows)
    if data.num_prompts is not None and data.num_prompts > len(rows) and not faults:
        text = f"{data.num_prompts} prompts are asked for, and {data.path} has {len(rows)} rows"
        yield Finding("error", f"{key}.num_prompts", text, (source,))


def _absent(rows: Sequence[Row], name: str) -> str | None:
    """A sentence if no row has this column."""
    if any(name in row.values for row in rows):
        return None
    known = list(dict.fromkeys(column for row in rows for column in row.values))
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"has no column {name!r} (it has {', '.join(map(repr, known)) or 'none'}){hint}"


def _contents(rows: Sequence[Row], name: str) -> tuple[list[tuple[Row, Any]], list[str]]:
    contents, faults = [], []
    for row in rows:
        try:
            contents.append((row, prompt_content(column(row, name), row.place, name)))
        except DataError as error:
            faults.append(str(error))
    return contents, faults


def _too_long(recipe: Recipe, data: DataConfig, contents: Sequence[tuple[Row, Any]]) -> list[str]:
    """Prompts that leave no room for the response; of a model that is not tiny, those whose text alone does not."""
    limit, context = prompt_limit(recipe, data), context_length(recipe)
    if data is recipe.data.eval and context is not None and recipe.eval.max_new_tokens is not None:
        limit = min(limit or context, context - recipe.eval.max_new_tokens)
    if limit is None or limit <= 0:
        return []
    try:
        count = token_counter(recipe, data)
    except ModelError:  # said by model_findings
        return []
    if count is None:
        return []
    longest = sorted(contents, key=lambda pair: -len(str(pair[1])))[:MAX_COUNTED]
    long = {row.place: tokens for row, content in longest if (tokens := count(content)) > limit}
    return [
        f"{row.place}: the prompt has {long[row.place]} tokens, and at most {limit} leave room for the response; "
        "shorten it, or lower max_new_tokens"
        for row, _ in contents
        if row.place in long
    ]


def _repeated_ids(rows: Sequence[Row]) -> list[str]:
    first: dict[str, str] = {}
    faults = []
    for row in rows:
        if row.values.get("id") is not None:
            name = repr(row.values["id"])
            if name in first:
                faults.append(f"{row.place}: the id {name} is that of {first[name]} too; ids must be unique")
            first.setdefault(name, row.place)
    return faults


def _task_findings(recipe: Recipe, key: str, data: DataConfig) -> Iterator[Finding]:
    assert data.task is not None
    wanted = data.num_prompts or num_prompts(recipe) or 1
    try:
        rows = make_task(data.task, data.task_options, split=_split(key), num=min(wanted, MAX_GENERATED)).rows
    except InputError as error:
        place = "task_options" if "option" in str(error) else "task"
        yield Finding("error", f"{key}.{place}", str(error), (f"{key}.task",))
        return
    contents = [(Row(str(row["id"]), row), row[data.prompt_column]) for row in rows if data.prompt_column in row]
    yield from _named(f"{key}.task", _too_long(recipe, data, contents), f"{key}.max_prompt_tokens", "model.tiny_config")
    made = len(rows)
    if made < min(wanted, MAX_GENERATED) and data.num_prompts is not None:
        text = f"{data.num_prompts} prompts are asked for, and {data.task} has {made} different ones with these options"
        yield Finding("error", f"{key}.num_prompts", text, (f"{key}.task", f"{key}.task_options"))


def _split(key: str) -> Any:
    return "eval" if key == "data.eval" else "train"


def _size_findings(recipe: Recipe, tables: _Tables) -> Iterator[Finding]:
    """A file that has fewer prompts than a step needs."""
    path = recipe.data.path
    if path is None or not tables.rows.get(path) or recipe.data.num_prompts is not None:
        return
    try:
        plan_batch(recipe.rollout.prompts_per_step, 2, num_prompts=len(tables.rows[path]))
    except ConfigError as error:
        text = str(error).replace("data.num_prompts = ", f"{path} has ").replace(" is fewer", " prompts, fewer")
        yield Finding("error", "data.path", text, ("rollout.prompts_per_step",))


# Gold answers.


def _gold_findings(recipe: Recipe, key: str, path: str, rows: Sequence[Row]) -> Iterator[Finding]:
    """Rows whose gold answer is missing, cannot be read, or is not accepted by the verifier that reads it."""
    functions = [f for f in recipe.reward.functions if f.name in (*VERIFIERS, "code")]
    if not functions:
        return
    name = recipe.reward.answer_column
    in_verl_form = all(isinstance(row.values.get("reward_model"), Mapping) for row in rows)
    if not in_verl_form and (absent := _absent(rows, name)):
        yield Finding("error", "reward.answer_column", f"{path} {absent}", (key, "reward.functions"))
        return
    golds = [(row, gold_of(row.values, name)) for row in rows]
    for function in functions:
        related = ("reward.functions", "reward.answer_column")
        if function.name == "code":
            yield from _named(key, _bad_problems(golds, name, function.options), *related)
            continue
        missing, present = _present_golds(golds, name)
        yield from _named(key, missing, *related)
        if recipe.reward.audit:
            yield from _named(key, _rejected(recipe, function.name, function.options, present), *related)


def _present_golds(golds: Sequence[tuple[Row, Any]], name: str) -> tuple[list[str], list[tuple[Row, str]]]:
    missing, present = [], []
    for row, gold in golds:
        if gold is None or (isinstance(gold, str) and not gold.strip()) or gold != gold:
            missing.append(f"{row.place}: there is no gold answer in the column {name!r}, so nothing could be scored")
        elif not isinstance(gold, (str, int, float)):
            kind = type(gold).__name__
            missing.append(
                f"{row.place}: the gold answer in the column {name!r} is a {kind}; text or a number is needed"
            )
        else:
            present.append((row, str(gold)))
    return missing, present


def _rejected(recipe: Recipe, name: str, options: Mapping[str, Any], golds: Sequence[tuple[Row, str]]) -> list[str]:
    first: dict[str, Row] = {}
    for row, gold in golds:
        first.setdefault(gold, row)
    distinct = list(first)
    stride = -(-len(distinct) // MAX_JUDGED[name]) or 1
    judged = distinct[::stride]
    reward = recipe.reward
    reasons = rejected_golds(name, judged, options, reward.timeout_s, reward.num_workers) if judged else []
    return [f"{first[gold].place}: {reason}" for gold, reason in zip(judged, reasons, strict=True) if reason]


def _bad_problems(golds: Sequence[tuple[Row, Any]], name: str, options: Mapping[str, Any]) -> list[str]:
    defaults, faults = problem_defaults(options), []
    for row, value in golds:
        if value is None:
            faults.append(f"{row.place}: there are no tests in the column {name!r}")
            continue
        try:
            read_problem(value, defaults)
        except InputError as error:
            faults.append(f"{row.place}: {error}")
    return faults


# Pairs and scripts.


def _pair_findings(recipe: Recipe, tables: _Tables) -> Iterator[Finding]:
    sft = recipe.sft
    assert sft is not None
    if sft.task is not None and sft.path is None:
        try:
            row = make_task(sft.task, sft.task_options, num=1).rows[0]
        except InputError as error:
            place = "task_options" if "option" in str(error) else "task"
            yield Finding("error", f"sft.{place}", str(error), ("sft.task",))
            return
        if "response" not in row:
            text = f'"{sft.task}" has no worked solutions to learn; take "arithmetic:addition" or a file (sft.path)'
            yield Finding("error", "sft.task", text)
    if sft.path is None or sft.task is not None:
        return
    rows, faults = tables.read(sft.path, "sft.path")
    yield from faults
    names = {"data.prompt_column": recipe.data.prompt_column, "sft.response_column": sft.response_column}
    absent = {key: said for key, name in names.items() if rows and (said := _absent(rows, name))}
    for key, said in absent.items():
        yield Finding("error", key, f"{sft.path} {said}", ("sft.path",))
    if rows and not absent:
        yield from _named("sft.path", list(_bad_pairs(recipe, rows)), *names, "model.tiny_config")


def _bad_pairs(recipe: Recipe, rows: Sequence[Row]) -> Iterator[str]:
    assert recipe.sft is not None
    contents, faults = _contents(rows, recipe.data.prompt_column)
    yield from faults
    context = context_length(recipe) if recipe.model.tiny is not None else None
    count = None if context is None else token_counter(recipe, recipe.data)
    for row, content in contents:
        name = recipe.sft.response_column
        response = row.values.get(name)
        if isinstance(response, (list, tuple)) and len(response) == 1 and isinstance(response[0], Mapping):
            response = response[0].get("content")
        if not isinstance(response, str) or not response:
            yield f"{row.place}: the column {name!r} is not a response but {response!r:.80}"
        elif context is not None and count is not None and (n := count(content) + len(response)) > context:
            yield f"{row.place}: prompt and response have {n} tokens, more than the model's context of {context}"


def _script_findings(recipe: Recipe, tables: _Tables) -> Iterator[Finding]:
    script = recipe.rollout.script
    if script is None or recipe.rollout.engine != "scripted":
        return
    rows, faults = tables.read(script, "rollout.script")
    yield from faults
    wrong = [
        f'{row.place}: needs "prompt_id" and a list "completions" that is not empty'
        for row in rows
        if "prompt_id" not in row.values or not _is_filled(row.values.get("completions"))
    ]
    yield from _named("rollout.script", wrong)
    prompts = tables.rows.get(recipe.data.path or "", [])
    if faults or wrong or recipe.data.num_prompts is not None or not prompts:
        return
    known = {str(row.values["prompt_id"]) for row in rows}
    unknown = [f"{script} has no completion for the prompt {row.place}" for row in prompts if row.place not in known]
    yield from _named("rollout.script", unknown, "data.path")


def _is_filled(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


# Held-out prompts.


def _overlaps(recipe: Recipe, tables: _Tables) -> Iterator[Finding]:
    """Held-out prompts that are trained on, also where they are laid out in another way."""
    held_out = recipe.data.eval
    if held_out is None or held_out.path is None:
        return
    evaluated = _by_content(tables.rows.get(held_out.path, []), held_out.prompt_column)
    sources = [("data.eval.path", recipe.data.path)]
    if recipe.sft is not None:
        sources.append(("sft.path", recipe.sft.path))
    for key, path in sources:
        if path is None or (key == "data.eval.path" and same_file(path, held_out.path)):
            continue
        trained = _by_content(tables.rows.get(path, []), recipe.data.prompt_column)
        faults = [
            f"{row.place}: this held-out prompt is trained on: {trained[content].place} of {path} is the same"
            for content, row in evaluated.items()
            if content in trained
        ]
        yield from _named(key, faults, "data.path", "data.prompt_column", "data.eval.prompt_column")


def _by_content(rows: Sequence[Row], name: str) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in rows:
        if row.values.get(name):
            found.setdefault(comparable(row.values[name]), row)
    return found
