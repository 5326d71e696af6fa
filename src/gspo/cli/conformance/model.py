"""A worked case, one answer to it, and when two answers are the same."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import dropwhile
from typing import Any, Protocol

import torch

from gspo.cli.conformance.implementation import Implementation, NotCheckedError
from gspo.errors import GspoError, InputError

NOT_CHECKED = "not checked"
NOT_OFFERED = "not offered"


@dataclass(frozen=True)
class Case:
    """One worked case; ``input`` is complete (an object or a list), ``faults`` is flat."""

    id: str
    title: str
    input: Any
    expected: Mapping[str, Any]
    faults: Mapping[str, Any]
    tolerance: str
    rule: str = ""
    remark: str = ""  # an expectation that is one sentence

    def tolerance_in(self, dtype: torch.dtype | None) -> float:
        """Absolute. ``1e-6 absolute in float32, 1e-9 in float64`` unless the case says otherwise."""
        precision = "float32" if dtype == torch.float32 else "float64"
        stated = re.search(rf"(\d[\d.e+-]*)[^,;\d]*in {precision}", self.tolerance)
        number = stated or re.match(r"\s*(\d[\d.e+-]*)", self.tolerance)
        default = 1e-6 if dtype == torch.float32 else 1e-9
        # Expected numbers are written with nine decimals.
        return (float(number[1]) if number else default) + 6e-10


@dataclass(frozen=True)
class Check:
    """One answer against one expectation.

    ``right is None``: nothing was compared; ``got`` says whether it was not checked or is not offered.
    """

    field: str
    right: bool | None
    got: Any
    expected: Any
    dtype: torch.dtype | None = None  # None: nothing is rounded here
    faults: Mapping[str, Any] = dataclass_field(default_factory=dict)  # answers of known faults to this one question


def unchecked(name: str, status: str = NOT_CHECKED) -> Check:
    """A part of a case that nothing is said about."""
    return Check(name, None, status, None)


Handler = Callable[[Case, Implementation, torch.dtype], list[Check]]
ExactHandler = Callable[[Case, Implementation], list[Check]]


class AnyShape(Protocol):
    """A kind of case."""

    def fits(self, given: Any) -> bool:
        """Whether an input is of this kind."""
        ...

    def run(self, case: Case, tested: Implementation) -> list[Check]:
        """The checks of a case of this kind; never raises because of the case or the tested code."""
        ...


@dataclass(frozen=True)
class Shape:
    """Numbers, computed in float64 and in float32. An input belongs here by the keys that it has."""

    keys: frozenset[str]
    handler: Handler

    def fits(self, given: Any) -> bool:
        return isinstance(given, Mapping) and self.keys <= given.keys()

    def run(self, case: Case, tested: Implementation) -> list[Check]:
        checks: list[Check] = []
        for dtype in (torch.float64, torch.float32):
            checks += _guarded(lambda dtype=dtype: self.handler(case, tested, dtype), dtype)  # type: ignore[misc]
        return checks


@dataclass(frozen=True)
class ExactShape:
    """Answers without rounding: verdicts, counts, ids, messages."""

    keys: frozenset[str]
    handler: ExactHandler

    def fits(self, given: Any) -> bool:
        return isinstance(given, Mapping) and self.keys <= given.keys()

    def run(self, case: Case, tested: Implementation) -> list[Check]:
        return _guarded(lambda: self.handler(case, tested), None)


def _guarded(call: Callable[[], list[Check]], dtype: torch.dtype | None) -> list[Check]:
    try:
        return call()
    except NotCheckedError as error:
        return [unchecked(str(error))]
    except GspoError as error:
        return [Check("refused", False, str(error), "an answer", dtype)]
    except (
        Exception
    ) as error:  # the case has other contents than its keys promise, or the tested code, anybody's, broke
        return [Check("failed", False, raised(error), "an answer", dtype)]


def raised(error: Exception) -> str:
    """An exception as an answer."""
    return f"raised {type(error).__name__}: {error}"


def same_answer(got: Any, expected: Any, tolerance: float, exact_zero: bool = False) -> bool:
    """Whether numbers agree; one expected number stands for every entry of a list. Text is read for a number."""
    if isinstance(got, list | tuple):
        wanted = expected if isinstance(expected, list | tuple) else [expected] * len(got)
        return len(got) > 0 and len(got) == len(wanted) and all(
            same_answer(g, w, tolerance, exact_zero) for g, w in zip(got, wanted, strict=True)
        )  # fmt: skip
    if got is None or expected is None:
        return got is expected
    if not isinstance(got, int | float) or not isinstance(expected, int | float | str):
        return False
    if isinstance(expected, str):
        if not math.isfinite(got):
            return ("nan" if math.isnan(got) else "inf") in re.split(r"[^a-z]+", expected.lower())
        number = re.match(r"\s*(-?\d+(\.\d+)?(e[+-]?\d+)?)\b", expected)
        return number is not None and abs(got - float(number[1])) <= tolerance
    if exact_zero and expected == 0:
        return got == 0
    return math.isfinite(got) and abs(got - expected) <= tolerance


def rounding(number: str) -> float:
    """Half a unit of the last decimal of a number that is written in a sentence."""
    return 0.5 * 10.0 ** -len(number.partition(".")[2]) * (1 + 1e-9)


def fault_of(check: Check, case: Case) -> str | None:
    """The known fault that gives this wrong answer, if there is one."""
    for name, answer in (*check.faults.items(), *case.faults.items()):
        numbers = re.match(r"\d+(?:,\d+)+(?= )", name)  # "4,1,4 by ...": the answer to this very question
        if numbers is not None and not check.field.endswith(f"/{numbers[0]}"):
            continue
        if _is_answer_of(check.got, answer, max(case.tolerance_in(check.dtype), 1e-8)):
            return name
    return None


def _is_answer_of(got: Any, answer: Any, tolerance: float) -> bool:
    """Sentences are compared by what they say happened: nothing came back, an exception, words of a message."""
    if isinstance(got, str) and isinstance(answer, str):
        if got.startswith("did not return"):
            return "not return" in answer
        exception = re.match(r"raised (\w+)", got)
        if exception is not None and exception[1] in answer:
            return True
        return len(answer) > 3 and answer.lower() in got.lower()
    if isinstance(got, bool) != isinstance(answer, bool):  # True is no answer to a question for a number
        return False
    return same_answer(got, answer, tolerance)


def compare(
    case: Case, dtype: torch.dtype | None, answers: Mapping[str, Any], exact: str = "grad|dloss|padding"
) -> list[Check]:
    """Checks answers whose name (up to a colon) is expected; those that match ``exact`` must be 0 where 0 is due."""
    checks = []
    for label, got in answers.items():
        name = label.split(":")[0]
        if name in case.expected:
            wanted = case.expected[name]
            right = same_answer(got, wanted, case.tolerance_in(dtype), re.search(exact, name) is not None)
            checks.append(Check(label.replace(":", "/", 1), right, got, wanted, dtype))
    return checks


def refusal(label: str, call: Callable[[], Any], dtype: torch.dtype | None = None) -> Check:
    """Right if the call refuses its input."""
    try:
        got: Any = call()
    except InputError as error:
        return Check(label, True, str(error), "refused", dtype)
    return Check(label, False, got, "refused", dtype)


class Sentence:
    """An expectation in words. Rules take out what they can check; what is left is not checked.

    >>> sentence = Sentence("4 micro-batches; the loss is blue")
    >>> sentence.take(r"(\\d+) micro-batches")[1], sentence.left()
    ('4', ['loss is blue'])
    """

    _FILLERS = frozenset(("a", "also", "and", "but", "either", "or", "so", "that", "the", "then", "with"))

    def __init__(self, text: str) -> None:
        self._rest = text

    def take(self, pattern: str) -> re.Match[str] | None:
        """The first match of a pattern, in any case; it is not found again."""
        found = re.search(pattern, self._rest, re.IGNORECASE)
        if found is not None:
            self._rest = f"{self._rest[: found.start()]};{self._rest[found.end() :]}"
        return found

    def left(self) -> list[str]:
        """What no rule took, in pieces."""
        pieces: Sequence[str] = re.split(r"[;,()]", self._rest)
        words = [piece.strip(" .").split() for piece in pieces]
        said = [list(dropwhile(lambda word: word.lower() in self._FILLERS, w)) for w in words]
        return [" ".join(w) for w in said if w]
