"""Whether what a program said is what was expected. Bytes and plain values in, a reason out; nothing is evaluated.

Text: line by line, blanks at line ends and empty lines at both ends do not matter (``lines``); or word by word
(``tokens``); or byte by byte (``exact``). Two words are the same if they are the same text, or if both are numbers, at
least one of them written with a point or an exponent, and within the tolerance, absolute or relative. Whole numbers are
compared as text: ``0011`` is not ``11``, and no digit of a large number is rounded away.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gspo.errors import DataError

Comparison = Literal["lines", "tokens", "exact"]
COMPARISONS: tuple[Comparison, ...] = ("lines", "tokens", "exact")
MAX_DIGITS = 1000  # of one number in JSON
_NUMBER = re.compile(rb"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?")
_WHOLE = re.compile(rb"[+-]?\d+")
_SHOWN = 60


def text_difference(expected: bytes, said: bytes, comparison: Comparison = "lines", tolerance: float = 1e-6) -> str:
    """Where two outputs differ; empty if they are the same.

    >>> text_difference(b"3\\n", b"3.0000001 \\n\\n")
    ''
    """
    if comparison == "exact":
        return "" if expected == said else f"{_show(said)} instead of {_show(expected)}"
    wanted, found = _words(expected, comparison), _words(said, comparison)
    for number, (left, right) in enumerate(zip(wanted, found, strict=False), 1):
        if len(left) != len(right) or not all(_same_word(a, b, tolerance) for a, b in zip(left, right, strict=True)):
            return f"line {number}: {_show(b' '.join(right))} instead of {_show(b' '.join(left))}"
    if len(wanted) != len(found):
        return f"{len(found)} lines instead of {len(wanted)}" if said.strip() else "no output"
    return ""


def _words(text: bytes, comparison: Comparison) -> list[list[bytes]]:
    if comparison == "tokens":
        return [text.split()]
    stripped = text.strip()
    return [line.split() for line in stripped.split(b"\n")] if stripped else []


def _same_word(expected: bytes, said: bytes, tolerance: float) -> bool:
    if expected == said:
        return True
    if len(said) > MAX_DIGITS or (_WHOLE.fullmatch(expected) and _WHOLE.fullmatch(said)):
        return False
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(said)):
        return False
    return _near(float(expected), float(said), tolerance)


def _near(expected: float, said: float, tolerance: float) -> bool:
    if math.isinf(expected) or math.isinf(said):
        return expected == said
    return abs(expected - said) <= tolerance * max(1.0, abs(expected))


def _show(text: bytes) -> str:
    shown = text[:_SHOWN].decode(errors="replace")
    return repr(shown) + ("..." if len(text) > _SHOWN else "")


def read_value(text: bytes) -> Any:
    """The plain value of one line of JSON from a box.

    Raises:
        ValueError: it is not JSON, holds NaN or an infinity, a number of more than ``MAX_DIGITS`` characters, or is
            nested too deeply.
    """
    try:
        return json.loads(
            text.decode("utf-8", "strict"), parse_int=_whole, parse_float=_finite, parse_constant=_no_constant
        )
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text) if len(text) <= MAX_DIGITS else math.inf
    if math.isinf(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a value that can be compared")


def same_value(expected: Any, said: Any, tolerance: float = 1e-6) -> bool:
    """Whether two JSON values are the same; floats within the tolerance, whole numbers and text exactly.

    >>> same_value([0.3], [0.1 * 3]), same_value(1, True), same_value(10**17, 10**17 + 1)
    (True, False, False)
    """
    if isinstance(expected, bool) or isinstance(said, bool) or expected is None or said is None:
        return type(expected) is type(said) and bool(expected == said)
    if isinstance(expected, int) and isinstance(said, int):
        return expected == said
    if isinstance(expected, (int, float)) and isinstance(said, (int, float)):
        return _near(_as_float(expected), _as_float(said), tolerance)
    if isinstance(expected, Sequence) and isinstance(said, Sequence) and not isinstance(expected, str):
        same_length = not isinstance(said, str) and len(expected) == len(said)
        return same_length and all(same_value(a, b, tolerance) for a, b in zip(expected, said, strict=True))
    if isinstance(expected, Mapping) and isinstance(said, Mapping):
        return expected.keys() == said.keys() and all(same_value(expected[k], said[k], tolerance) for k in expected)
    return type(expected) is type(said) and bool(expected == said)


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def check_comparison(name: str) -> Comparison:
    """The comparison of that name.

    Raises:
        DataError: there is none.
    """
    for known in COMPARISONS:
        if name == known:
            return known
    raise DataError(f"there is no comparison {name!r}; there are {', '.join(COMPARISONS)}")
