"""Problems with tests from the data set open-r1/codeforces (columns as of 2025).

A row is taken if it can be judged as it stands: standard input and output, no interaction, all official tests there and
none cut, and no checker of its own (those of the data set have a protocol of their own). Other rows are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.errors import DataError

#: What tells a row of this data set from others.
COLUMNS = ("contest_id", "index", "official_tests", "official_tests_complete", "input_mode")


def is_row(values: Any) -> bool:
    return isinstance(values, Mapping) and all(name in values for name in COLUMNS)


def problem_of(values: Mapping[str, Any], where: str) -> tuple[dict[str, Any] | None, str]:
    """(a problem with ``contestId``, ``index``, ``prompt`` and ``answer``, or None; why not).

    Raises:
        DataError: a column that cannot be read.
    """
    why = _unfit(values)
    if why:
        return None, why
    text = str(values["contest_id"])
    if not text.isdecimal():
        raise DataError(f"{where}, column 'contest_id': {text!r} is no number")
    tests = [_pair(test, where) for test in values["official_tests"]]
    answer: dict[str, Any] = {"tests": tests}
    for name, column in (("cpu_s", "time_limit"), ("memory_mb", "memory_limit")):
        limit = values.get(column)
        if limit is not None:
            if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
                raise DataError(f"{where}, column {column!r}: {limit!r} is no limit")
            answer[name] = limit
    problem = {"contestId": int(text), "index": str(values["index"]), "prompt": _prompt(values), "answer": answer}
    return problem, ""


def _unfit(values: Mapping[str, Any]) -> str:
    if values.get("input_mode") != "stdio":
        return "reads files"
    if values.get("interaction_format"):
        return "interactive"
    if not values.get("official_tests") or not values.get("official_tests_complete"):
        return "incomplete tests"
    return "a checker of its own" if values.get("generated_checker") else ""


def _pair(test: Any, where: str) -> list[str]:
    if not isinstance(test, Mapping) or not all(isinstance(test.get(name), str) for name in ("input", "output")):
        raise DataError(f"{where}, column 'official_tests': {str(test)[:60]!r} is no test with input and output")
    return [test["input"], test["output"]]


def _prompt(values: Mapping[str, Any]) -> str:
    """The statement with its parts, its examples, and what to write."""
    parts = [f"# {values['title']}"] if values.get("title") else []
    parts += [str(values.get("description") or "")]
    for name, column in (("Input", "input_format"), ("Output", "output_format"), ("Note", "note")):
        if values.get(column):
            parts.append(f"## {name}\n{values[column]}")
    for number, example in enumerate(values.get("examples") or [], 1):
        parts.append(f"## Example {number}\nInput:\n{example.get('input')}\nOutput:\n{example.get('output')}")
    limits = [
        f"{values[column]:g} {unit}"
        for column, unit in (("time_limit", "seconds"), ("memory_limit", "megabytes"))
        if values.get(column)
    ]
    task = "Write a Python program that reads standard input and writes standard output"
    limited = f", within {' and '.join(limits)}" if limits else ""
    parts.append(f"{task}{limited}. Answer with one fenced Python code block.")
    return "\n\n".join(part.strip() for part in parts if part.strip())
