"""Programming problems as data have them, read into one type.

Our own form, a JSON object or its text::

    {"tests": [["3\\n1 2 3\\n", "6"], ...]}                                   programs: standard input, expected output
    {"tests": [[[[1, 2], 3], [3, 6]], ...], "function": "scale"}             one call: arguments, expected value

with, optionally, ``comparison``, ``tolerance``, ``cpu_s``, ``wall_s``, ``memory_mb``, and ``checker`` (Python source)
or ``checker_file`` (a path: Python, or an executable) with testlib's arguments and exit codes. Also read:
``{"inputs": [..], "outputs": [..], "fn_name": ..}`` as in APPS and TACO.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gspo.errors import DataError
from gspo.rewards.output import Comparison, check_comparison
from gspo.sandbox.limits import Limits

_KEYS = (
    "tests", "function", "fn", "comparison", "tolerance", "cpu_s", "wall_s", "memory_mb", "checker", "checker_file",
    "inputs", "outputs", "fn_name",
)  # fmt: skip
_LIMITS = ("cpu_s", "wall_s", "memory_mb")
#: What a recipe may set for problems that say nothing of it.
PROBLEM_DEFAULTS = (*_LIMITS, "tolerance", "comparison")


@dataclass(frozen=True)
class CodeTest:
    """One test: standard input and output as bytes, or arguments and value as plain values."""

    given: Any
    expected: Any


@dataclass(frozen=True)
class CodeProblem:
    """What a program has to do."""

    tests: tuple[CodeTest, ...]
    function: str = ""  # empty: a program that reads standard input
    limits: Limits = field(default_factory=Limits)  # of each test
    comparison: Comparison = "lines"
    tolerance: float = 1e-6
    checker: str | bytes | None = None  # Python source, or an executable
    prelude: str = ""  # of a call: Python that runs before the program, such as a platform's imports


def read_problem(value: Any, defaults: Mapping[str, Any] | None = None) -> CodeProblem:
    """A problem from a column's value.

    Args:
        value: an object of one of the forms above, or its JSON text.
        defaults: limits, tolerance and comparison of problems that name none.

    Raises:
        DataError: the value has none of the forms, or no tests.
        InputError: a limit is not positive.
    """
    fields = _fields(value)
    settings = {**(defaults or {}), **{name: fields[name] for name in fields if fields[name] is not None}}
    function = str(fields.get("function") or fields.get("fn") or fields.get("fn_name") or "").partition("(")[0].strip()
    pairs = _pairs(fields)
    if not pairs:
        raise DataError("the problem has no tests; every program would pass it")
    limits = Limits(**{name: _number(name, settings[name]) for name in _LIMITS if settings.get(name) is not None})
    return CodeProblem(
        tests=tuple(_call_test(*pair) if function else _text_test(*pair) for pair in pairs),
        function=function,
        limits=limits,
        comparison=check_comparison(settings.get("comparison", "lines")),
        tolerance=_number("tolerance", settings.get("tolerance", 1e-6)),
        checker=_checker(fields),
    )


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise DataError(f"{name} is {value!r}; a number is needed")
    return value


def _fields(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"the tests are not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise DataError(f"the tests are {type(value).__name__}; an object with 'tests' is needed")
    for name in value:
        if name not in _KEYS:
            close = get_close_matches(str(name), _KEYS, n=1)
            raise DataError(
                f"the tests have an unknown key {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
    return value


def _pairs(fields: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    if "tests" not in fields and not ("inputs" in fields and "outputs" in fields):
        raise DataError("the problem has neither 'tests' nor 'inputs' and 'outputs'")
    if "tests" in fields:
        tests = fields["tests"]
        if not _is_list(tests) or not all(_is_list(test) and len(test) == 2 for test in tests):
            raise DataError("'tests' must be a list of pairs [input, expected]")
        return [(test[0], test[1]) for test in tests]
    inputs, outputs = fields["inputs"], fields["outputs"]
    if not _is_list(inputs) or not _is_list(outputs) or len(inputs) != len(outputs):
        raise DataError("'inputs' and 'outputs' must be lists of the same length")
    return list(zip(inputs, outputs, strict=True))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _text_test(given: Any, expected: Any) -> CodeTest:
    for value in (given, expected):
        if not isinstance(value, str):
            raise DataError(
                f"a test has {type(value).__name__} {str(value)[:60]!r} where text is needed; is 'function' missing?"
            )
    return CodeTest(*(value.encode("utf-8", "surrogatepass") for value in (given, expected)))


def _call_test(given: Any, expected: Any) -> CodeTest:
    if not _is_list(given):
        raise DataError(f"the arguments {str(given)[:60]!r} of a call are not a list")
    return CodeTest(list(given), expected)


def _checker(fields: Mapping[str, Any]) -> str | bytes | None:
    source, path = fields.get("checker"), fields.get("checker_file")
    if source is not None and path is not None:
        raise DataError("the problem has both 'checker' and 'checker_file'; keep one of the two")
    if path is None:
        return None if source is None else str(source)
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"the checker cannot be read: {error}") from error
    return content.decode() if str(path).endswith(".py") else content
