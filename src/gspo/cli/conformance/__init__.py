"""``gspo conformance FILE...``: runs this build on files of worked cases and names the faults it finds.

A file is a JSON list of cases: id, title, rule, input, expected, known_wrong_answers, tolerance. What a case asks is
told by the keys of its input, never by its id, and every answer is computed from the input. An input of the form
``{"base": "ID", ...}`` takes over the input of another case of the same file.

This file reads, runs and prints; ``losses`` and ``rewards`` hold the shapes of input that are understood.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from gspo.cli.conformance.losses import LOSS_SHAPES
from gspo.cli.conformance.model import Case, Check, Handler, Implementation, same_answer
from gspo.cli.conformance.rewards import REWARD_SHAPES
from gspo.errors import DataError, GspoError


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case: no checks means that its input was not understood."""

    case: Case
    checks: tuple[Check, ...]

    @property
    def word(self) -> str:
        if not self.wrong and not any(check.right for check in self.checks):
            return "not understood"
        return "wrong" if self.wrong else "right"

    @property
    def wrong(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.right is False)

    @property
    def not_checked(self) -> list[str]:
        """Expectations that no check covers, and parts of the input that could not be read."""
        covered = {check.field.split("/")[0] for check in self.checks if check.right is not None}
        missing = [name for name in self.case.expected if name not in covered]
        return [*missing, *(check.field for check in self.checks if check.right is None)]


def conformance(files: Sequence[Path], out: TextIO, implementation: Implementation | None = None) -> int:
    """Runs every case of every file and prints a line for each.

    Args:
        files: JSON files of cases.
        out: where to print.
        implementation: what to test; this package's own by default.

    Returns:
        0 if at least one case is right and none is wrong, 1 if a case is wrong or none was understood, 2 if a file
        could not be read (the others are still run).
    """
    tested = implementation or Implementation()
    verdicts: list[Verdict] = []
    unreadable = 0
    for file in files:
        try:
            cases = read_cases(file)
        except DataError as error:
            unreadable += 1
            print(f"error: {error}", file=out)
            continue
        print(f"{file}:", file=out)
        for case in cases:
            verdict = run_case(case, tested)
            verdicts.append(verdict)
            _print_verdict(verdict, out)
    words = [verdict.word for verdict in verdicts]
    summary = ", ".join(f"{words.count(word)} {word}" for word in ("right", "wrong", "not understood"))
    print(f"{len(words)} cases: {summary}", file=out)
    if unreadable:
        return 2
    return 0 if "right" in words and "wrong" not in words else 1


def read_cases(file: Path) -> list[Case]:
    """The cases of a file, with their references to other cases resolved.

    Raises:
        DataError: the file cannot be read, or is not a list of cases.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise DataError(f"{file} is not a list of cases; each case is an object with id, input and expected")
    by_id = {str(entry.get("id")): entry for entry in content}
    return [_case(entry, by_id, file, position) for position, entry in enumerate(content)]


def _case(entry: Mapping[str, Any], by_id: Mapping[str, Mapping[str, Any]], file: Path, position: int) -> Case:
    """A case whose input or expectation is not an object keeps an empty one: it will not be understood."""
    name = str(entry.get("id", f"#{position}"))
    given = _object(entry, "input")
    base = given.get("base")
    if base is not None:
        if str(base) not in by_id or str(base) == name:
            raise DataError(f"{file}: case {name!r} refers to case {base!r}, which is not in the file")
        given = {**_object(by_id[str(base)], "input"), **given}
    return Case(
        id=name,
        title=str(entry.get("title", "")),
        input=given,
        expected=_object(entry, "expected"),
        faults=_flat(_object(entry, "known_wrong_answers")),
        tolerance=str(entry.get("tolerance", "")),
    )


def _object(entry: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = entry.get(key)
    return dict(value) if isinstance(value, dict) else {}


def _flat(faults: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined with a slash."""
    result: dict[str, Any] = {}
    for name, value in faults.items():
        if isinstance(value, dict):
            result |= _flat(value, f"{prefix}{name}/")
        else:
            result[f"{prefix}{name}"] = value
    return result


def run_case(case: Case, implementation: Implementation) -> Verdict:
    """Checks one case in float64 and in float32."""
    handler = _handler(case)
    if handler is None:
        return Verdict(case, ())
    checks: list[Check] = []
    for dtype in (torch.float64, torch.float32):
        try:
            checks += handler(case, implementation, dtype)
        except GspoError as error:
            checks.append(Check("refused", False, str(error), "an answer", dtype))
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            # The input has the keys of a known shape but other contents, or the tested code broke on it.
            checks.append(Check("failed", False, f"{type(error).__name__}: {error}", "an answer", dtype))
    return Verdict(case, tuple(checks))


def _handler(case: Case) -> Handler | None:
    for shape in (*LOSS_SHAPES, *REWARD_SHAPES):
        if shape.fits(case.input):
            return shape.handler
    return None


def fault_of(check: Check, case: Case) -> str | None:
    """The known fault that gives this wrong answer, if there is one."""
    for name, answer in case.faults.items():
        if same_answer(check.got, answer, max(case.tolerance_in(check.dtype), 1e-8)):
            return name
    return None


def _print_verdict(verdict: Verdict, out: TextIO) -> None:
    case = verdict.case
    if verdict.word == "not understood":
        keys = ", ".join(case.input) or "not an object"
        print(f"  {case.id:<6} not understood  {case.title} (input: {keys})", file=out)
        return
    count = sum(check.right is not None for check in verdict.checks)
    print(f"  {case.id:<6} {verdict.word:<14}  {case.title} ({count} checks)", file=out)
    for check in verdict.wrong:
        precision = str(check.dtype).removeprefix("torch.")
        line = f"         {check.field} in {precision}: got {_short(check.got)}, expected {_short(check.expected)}"
        fault = fault_of(check, case)
        print(f"{line}; this is the answer of the fault {fault!r}" if fault else line, file=out)
    names = list(dict.fromkeys(verdict.not_checked))
    if names:
        print(f"         not checked: {', '.join(names)}", file=out)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_short(entry) for entry in value) + "]"
    return str(value)
