"""AIME 2024: 30 problems whose answers are integers from 000 to 999.

Protocol of the paper: mean pass@1 over 32 responses. The files are the user's; known layouts are in ``LAYOUTS``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gspo.data.prompts import prompt_content
from gspo.errors import ConfigError, DataError
from gspo.evals.benchmark import Benchmark, Imported, Options, Problem, SamplingProtocol
from gspo.evals.graders import IntegerGrader
from gspo.evals.tables import Record, read_records

NUM_PROBLEMS: Final = 30
YEAR: Final = "2024"
INSTRUCTION: Final = "\n\nThink step by step, and put the final answer, an integer from 0 to 999, in \\boxed{}."
_YEAR_IN: Final = re.compile(r"(?<!\d)(19[89]\d|20\d\d)(?!\d)")


@dataclass(frozen=True)
class Layout:
    """Columns by which a layout is known; ``year`` is one that tells the year of the contest."""

    name: str
    id: str
    problem: str
    answer: str
    also: tuple[str, ...] = ()  # further columns that tell it from others
    year: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.id, self.problem, self.answer, *self.also)


#: The first whose columns are all there is taken.
LAYOUTS: Final = (
    Layout("verl", "", "prompt", "reward_model.ground_truth"),
    Layout("NeMo-Skills", "id", "problem", "expected_answer"),
    Layout("Maxwell-Jia", "ID", "Problem", "Answer", year=("ID",)),
    Layout("MathArena", "problem_idx", "problem", "answer"),
    Layout("HuggingFaceH4", "id", "problem", "answer", ("solution",), ("year", "url")),
)


def read(paths: Sequence[Path], options: Options) -> Imported:
    """The problems of one or several files of one layout.

    Raises:
        DataError: no known layout, an answer that is no integer from 0 to 999, a contest of another year, one problem
            with two answers, or another number of problems than expected; names file, line and column.
    """
    files = [read_records(path) for path in paths]
    layout = _layout(files[0][0])
    groups = [[_problem(record, layout, index) for index, record in enumerate(records)] for records in files]
    unique, repeated = _without_repeats(_told_apart(groups))
    expected = _expected(options)
    if len(unique) != expected:
        raise DataError(_wrong_count(len(unique), expected, "num_problems" in options))
    mapped = f"layout {layout.name}: problem from {layout.problem!r}, answer from {layout.answer!r}"
    named = f", id from {layout.id!r}" if layout.id else ", ids are row numbers"
    return Imported(tuple(unique), layout.name, (mapped + named, *repeated, *_notes(layout)))


def _layout(record: Record) -> Layout:
    for layout in LAYOUTS:
        if all(_has(record, name) for name in layout.needs if name):
            return layout
    known = "; ".join(f"{layout.name} ({', '.join(name for name in layout.needs if name)})" for layout in LAYOUTS)
    columns = ", ".join(map(repr, record.values))
    raise DataError(
        f"{record.place}: the columns {columns} are of no known layout of AIME 2024; known are {known}. Rename the "
        "columns to one of these, or take --benchmark custom"
    )


def _has(record: Record, name: str) -> bool:
    head, _, rest = name.partition(".")
    value = record.values.get(head)
    return value is not None and (not rest or (isinstance(value, dict) and value.get(rest) is not None))


def _problem(record: Record, layout: Layout, index: int) -> Problem:
    for column in layout.year:
        year = _YEAR_IN.search(str(record.values.get(column, "")))
        if year is not None and year[1] != YEAR:
            raise record.fault(column, f"is of {year[1]}; this benchmark is AIME {YEAR}, keep its {NUM_PROBLEMS} rows")
    value = record.get(layout.problem)
    prompt: Any = record.text(layout.problem) if isinstance(value, str) else None
    if prompt is None:
        if layout.name != "verl":
            raise record.fault(layout.problem, "is not text")
        prompt = prompt_content(value, record.place, layout.problem)
    name = str(record.get(layout.id)).strip() if layout.id else str(index + 1)
    return Problem(name, prompt, gold_integer(record, layout.answer), record.place)


def gold_integer(record: Record, column: str) -> str:
    """The answer of a row as an integer from 0 to 999.

    Raises:
        DataError: it is none.
    """
    value = record.get(column)
    text = str(value).strip()
    if isinstance(value, float) and value.is_integer():
        text = str(int(value))
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,3}", text):
        raise record.fault(column, f"is {value!r}; an answer is an integer from 000 to 999")
    return str(int(text))


def _told_apart(groups: Sequence[Sequence[Problem]]) -> list[Problem]:
    """The problems of all files; where two files number their problems alike, the number of the file is put first."""
    names = [{problem.id for problem in group} for group in groups]
    clash = len(set().union(*names)) < sum(map(len, names))
    return [
        replace(problem, id=f"{number}/{problem.id}") if clash else problem
        for number, group in enumerate(groups, 1)
        for problem in group
    ]


def _without_repeats(problems: Sequence[Problem]) -> tuple[list[Problem], tuple[str, ...]]:
    """Each problem once; files for training repeat them, once per response that is to be sampled."""
    first: dict[str, Problem] = {}
    counts: Counter[str] = Counter()
    for problem in problems:
        key = _text_of(problem.prompt)
        counts[key] += 1
        known = first.setdefault(key, problem)
        if known.gold != problem.gold:
            raise DataError(
                f"{problem.place}: has the same problem as {known.place} with another answer ({problem.gold} and "
                f"{known.gold})"
            )
    unique = list(first.values())
    if len(unique) == len(problems):
        return unique, ()
    times = sorted(set(counts.values()))
    often = f"each {times[0]} times" if len(times) == 1 else f"{times[0]} to {times[-1]} times each"
    return unique, (f"{len(problems)} rows are {len(unique)} problems, {often}; every problem is kept once",)


def _text_of(prompt: Any) -> str:
    return " ".join((prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)).split())


def _expected(options: Options) -> int:
    text = options.get("num_problems", str(NUM_PROBLEMS))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--option num_problems={text}: a whole number from 1 on is needed")
    return int(text)


def _wrong_count(found: int, expected: int, asked: bool) -> str:
    if asked:
        return f"the data hold {found} problems, and --option num_problems says {expected}"
    reason = {
        15: "15 is one of its two contests: give the file of the other one too (--data I --data II)",
        90: "90 is the set of AIME 2022 to 2024: keep the rows of 2024",
        60: "60 is two years together: keep the rows of 2024",
    }.get(found, "rows are missing, or others are among them")
    return (
        f"the data hold {found} problems and AIME {YEAR} has {expected}; {reason}. A result on other problems is not "
        f"comparable with published ones; if that is meant, say so: --option num_problems={found}"
    )


def _notes(layout: Layout) -> tuple[str, ...]:
    if layout.name == "verl":
        return ("prompts are taken as the file has them, its own instruction included; --instruction is not added",)
    return ()


def _grader(options: Options, imported: Imported) -> IntegerGrader:
    return IntegerGrader(0, 999)


AIME24: Final = Benchmark(
    name="aime24",
    title="AIME 2024",
    protocol=SamplingProtocol(num_samples=32, max_new_tokens=32768, temperature=1.0, instruction=INSTRUCTION),
    read=read,
    make_grader=_grader,
    option_names={"num_problems": "how many problems the data have, if that is not 30"},
)
