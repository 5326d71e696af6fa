"""``gspo conformance FILE...``: runs this build on files of worked cases and names the faults it finds.

What a case asks is told by the keys of its input, never by its id, and every answer is computed from the input; the
format is in ``docs/conformance.md``. ``cases`` reads files, this file runs and prints, ``model`` says what a case, a
check and a shape are, ``implementation`` what is tested; the others hold the shapes of input that are understood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from gspo.cli.conformance.answers import ANSWER_SHAPES
from gspo.cli.conformance.batches import BATCH_SHAPES
from gspo.cli.conformance.cases import read_cases
from gspo.cli.conformance.evaluation import EVALUATION_SHAPES
from gspo.cli.conformance.hanging import HANGING_SHAPES
from gspo.cli.conformance.implementation import Implementation
from gspo.cli.conformance.losses import LOSS_SHAPES
from gspo.cli.conformance.model import NOT_CHECKED, NOT_OFFERED, AnyShape, Case, Check, fault_of
from gspo.cli.conformance.rewards import REWARD_SHAPES
from gspo.cli.conformance.rollouts import ROLLOUT_SHAPES
from gspo.errors import DataError

__all__ = ["Case", "Check", "Implementation", "Verdict", "conformance", "read_cases", "run_case"]

#: Tried in order; the last takes any object of lists of numbers.
SHAPES: tuple[AnyShape, ...] = (
    *LOSS_SHAPES,
    *ROLLOUT_SHAPES,
    *EVALUATION_SHAPES,
    *BATCH_SHAPES,
    *HANGING_SHAPES,
    *ANSWER_SHAPES,
    *REWARD_SHAPES,
)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case: no checks means that its input was not understood."""

    case: Case
    checks: tuple[Check, ...]

    @property
    def word(self) -> str:
        if self.wrong:
            return "wrong"
        return "right" if any(check.right for check in self.checks) else "not understood"

    @property
    def wrong(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.right is False)

    @property
    def not_checked(self) -> list[str]:
        """Expectations that no check covers, and parts of the case that could not be read."""
        touched = {check.field.split("/")[0] for check in self.checks}
        missing = [name for name in self.case.expected if name not in touched]
        return list(dict.fromkeys([*missing, *self._left_out(NOT_CHECKED)]))

    @property
    def not_offered(self) -> list[str]:
        """Expectations about options that the tested implementation does not have."""
        return list(dict.fromkeys(self._left_out(NOT_OFFERED)))

    def _left_out(self, status: str) -> list[str]:
        return [check.field for check in self.checks if check.right is None and check.got == status]


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
    words: list[str] = []
    unreadable = 0
    for file in files:
        try:
            cases = read_cases(file)
        except DataError as error:
            unreadable += 1
            _say(f"error: {error}", out)
            continue
        _say(f"{file}:", out)
        for case in cases:
            verdict = run_case(case, tested)
            words.append(verdict.word)
            _print_verdict(verdict, out)
    summary = ", ".join(f"{words.count(word)} {word}" for word in ("right", "wrong", "not understood"))
    _say(f"{len(words)} cases: {summary}", out)
    if unreadable:
        return 2
    return 0 if "right" in words and "wrong" not in words else 1


def run_case(case: Case, implementation: Implementation) -> Verdict:
    """Checks one case; what is rounded, in float64 and in float32."""
    for shape in SHAPES:
        if shape.fits(case.input):
            return Verdict(case, tuple(shape.run(case, implementation)))
    return Verdict(case, ())


def _print_verdict(verdict: Verdict, out: TextIO) -> None:
    case = verdict.case
    if verdict.word == "not understood":
        keys = ", ".join(map(str, case.input)) if isinstance(case.input, Mapping) else "a list"
        _say(f"  {case.id:<6} not understood  {case.title} (input: {_short(keys or 'not an object')})", out)
    else:
        count = sum(check.right is not None for check in verdict.checks)
        _say(f"  {case.id:<6} {verdict.word:<14}  {case.title} ({count} checks)", out)
    for check in verdict.wrong:
        precision = "" if check.dtype is None else f" in {str(check.dtype).removeprefix('torch.')}"
        line = f"         {check.field}{precision}: got {_short(check.got)}, expected {_short(check.expected)}"
        fault = fault_of(check, case)
        _say(f"{line}; this is the answer of the fault {fault!r}" if fault else line, out)
    if verdict.not_checked:
        _say(f"         not checked: {', '.join(verdict.not_checked)}", out)
    if verdict.not_offered:
        _say(f"         not offered: {', '.join(verdict.not_offered)}", out)


def _say(line: str, out: TextIO) -> None:
    """Prints; what the stream cannot encode (half of a surrogate pair, a symbol in ASCII) is escaped."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=out)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_short(entry) for entry in value) + "]"
    text = " ".join(str(value).split())
    return text if len(text) <= 400 else f"{text[:397]}..."
