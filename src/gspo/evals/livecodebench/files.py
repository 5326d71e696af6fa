"""Problems of LiveCodeBench from its own files, ``test*.jsonl`` of ``code_generation_lite``.

The files are large (gigabytes, nearly all of it private tests), so they are read line by line; what is kept of a
problem's tests is where they stand, and they are read again when a response to it is judged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gspo.errors import DataError
from gspo.evals.livecodebench.private_tests import decode_private
from gspo.evals.livecodebench.release import Window

COLUMNS = (
    "question_title", "question_content", "platform", "question_id", "contest_id", "contest_date", "starter_code",
    "difficulty", "public_test_cases", "private_test_cases", "metadata",
)  # fmt: skip
PLATFORMS = ("leetcode", "atcoder", "codeforces")


@dataclass(frozen=True)
class TextTest:
    """One test as the files have it: for calls, one argument per line of ``given``, each JSON."""

    given: str
    expected: str


@dataclass(frozen=True)
class Tests:
    """The tests of one problem, public ones first."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    tests: tuple[TextTest, ...]
    num_public: int
    function: str  # empty: a program that reads standard input
    unreadable: str = ""  # which call is not JSON: no program can be judged by it


@dataclass(frozen=True)
class StoredTests:
    """Where the tests of a problem stand. As text it is their digest, which does not depend on the file."""

    path: Path
    offset: int
    where: str
    sha256: str

    def __str__(self) -> str:
        return f"sha256:{self.sha256}"

    def load(self) -> Tests:
        """The tests, read from the file.

        Raises:
            DataError: the file is not what it was, or the tests cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                row = json.loads(file.readline())
        except (OSError, ValueError) as error:
            raise DataError(f"{self.where}: changed while in use ({error}); evaluate again") from error
        if not isinstance(row, dict) or tests_digest(row) != self.sha256:
            raise DataError(f"{self.where}: changed while in use; evaluate again")
        return read_tests(row, self.where)


@dataclass(frozen=True)
class LiveProblem:
    """One problem."""

    id: str
    title: str
    statement: str
    platform: str
    contest_id: str
    day: date
    difficulty: str
    starter_code: str
    function: str
    tests: StoredTests
    unreadable: str  # see Tests
    where: str


def read_problems(paths: Sequence[Path], window: Window) -> tuple[list[LiveProblem], int]:
    """The problems in the window, in the order of their ids, and how many problems the files hold in all.

    The tests of the problems in the window are read once, so that a fault in them is found before anything is sampled.

    Raises:
        DataError: a file, line or column that cannot be read, or a problem that is there twice.
    """
    found: dict[str, LiveProblem] = {}
    seen: dict[str, str] = {}
    for path in paths:
        for row, offset, where in _rows(path):
            problem_id = _text(row, "question_id", where)
            if problem_id in seen:
                raise DataError(f"{where}: problem {problem_id!r} is in {seen[problem_id]} too")
            seen[problem_id] = where
            day = _day(row, where)
            if window.holds(day):
                found[problem_id] = _problem(row, problem_id, day, path, offset, where)
    return [found[name] for name in sorted(found)], len(seen)


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int, str]]:
    """(row, byte offset of its line, place) of each line."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        number = 0
        while True:
            offset = file.tell()
            line = file.readline()
            if not line:
                break
            number += 1
            if not line.strip():
                continue
            where = f"{path.name}, line {number}"
            try:
                row = json.loads(line)
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: is not UTF-8") from error
            except json.JSONDecodeError as error:
                cut = "" if line.endswith(b"\n") else "; the file seems cut short"
                raise DataError(f"{where}, column {error.colno}: is not JSON ({error.msg}){cut}") from error
            if not isinstance(row, dict):
                raise DataError(f"{where}: is {type(row).__name__}; an object with columns is needed")
            yield row, offset, where


def _problem(row: dict[str, Any], problem_id: str, day: date, path: Path, offset: int, where: str) -> LiveProblem:
    platform = _text(row, "platform", where)
    if platform not in PLATFORMS:
        raise DataError(f"{where}, column 'platform': {platform!r} is none of {', '.join(PLATFORMS)}")
    tests = read_tests(row, where)
    return LiveProblem(
        id=problem_id,
        title=_text(row, "question_title", where),
        statement=_text(row, "question_content", where),
        platform=platform,
        contest_id=str(row.get("contest_id", "")),
        day=day,
        difficulty=str(row.get("difficulty", "")),
        starter_code=_text(row, "starter_code", where, empty=True),
        function=tests.function,
        tests=StoredTests(path, offset, where, tests_digest(row)),
        unreadable=tests.unreadable,
        where=where,
    )


def tests_digest(row: Mapping[str, Any]) -> str:
    """SHA-256 of the columns that tests are read from."""
    digest = hashlib.sha256()
    for column in ("public_test_cases", "private_test_cases", "metadata"):
        digest.update(str(row.get(column)).encode("utf-8", "surrogatepass") + b"\x1e")
    return digest.hexdigest()


def read_tests(row: Mapping[str, Any], where: str) -> Tests:
    """Public and private tests of a row.

    Raises:
        DataError: they cannot be read, are of both kinds, or there are none.
    """
    public = _cases(_text(row, "public_test_cases", where), "public_test_cases", where)
    private = _cases(_private(row, where), "private_test_cases", where)
    cases = [*public, *private]
    kinds = {str(case.get("testtype")) for case in cases}
    if not cases:
        raise DataError(f"{where}: the problem has no tests; every program would pass it")
    if kinds not in ({"stdin"}, {"functional"}):
        raise DataError(
            f"{where}: the tests are of type {', '.join(sorted(kinds))}; all stdin or all functional is needed"
        )
    function = ""
    if kinds == {"functional"}:
        function = _function(row, where)
    tests = tuple(TextTest(_part(case, "input", where), _part(case, "output", where)) for case in cases)
    return Tests(tests, len(public), function, _unreadable(tests) if function else "")


def _private(row: Mapping[str, Any], where: str) -> str:
    text = _text(row, "private_test_cases", where)
    if text.lstrip()[:1] == "[":
        return text
    try:
        return decode_private(text)
    except ValueError as error:
        raise DataError(f"{where}, column 'private_test_cases': {error}") from error


def _cases(text: str, column: str, where: str) -> list[dict[str, Any]]:
    try:
        cases = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}, column {column!r}: is not JSON ({error})") from error
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise DataError(f"{where}, column {column!r}: is not a list of objects with input, output and testtype")
    return cases


def _part(case: Mapping[str, Any], name: str, where: str) -> str:
    value = case.get(name)
    if not isinstance(value, str):
        raise DataError(f"{where}: a test has {type(value).__name__} as its {name}; text is needed")
    return value


def _function(row: Mapping[str, Any], where: str) -> str:
    text = row.get("metadata")
    try:
        metadata = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise DataError(f"{where}, column 'metadata': is not JSON ({error})") from error
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name.isidentifier():
        raise DataError(f"{where}, column 'metadata': names no function (func_name is {name!r}); its tests are calls")
    return name


def _unreadable(tests: Sequence[TextTest]) -> str:
    """The first call that is not JSON. The data have such faults, and the whole problem falls with one of them."""
    for number, test in enumerate(tests, 1):
        try:
            arguments_of(test)
            expected_value(test)
        except (ValueError, RecursionError) as error:
            return f"test {number} is not JSON ({error})"
    return ""


def arguments_of(test: TextTest) -> list[Any]:
    """The arguments of a call: one line each.

    Raises:
        ValueError: a line is not JSON.
    """
    return [json.loads(line) for line in test.given.split("\n")]


def expected_value(test: TextTest) -> Any:
    """The value that a call has to return.

    Raises:
        ValueError: it is not JSON.
    """
    return json.loads(test.expected)


def _text(row: Mapping[str, Any], column: str, where: str, empty: bool = False) -> str:
    if column not in row:
        close = get_close_matches(column, list(row), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, list(row)[:8])) or 'none'}"
        raise DataError(f"{where}: has no column {column!r}; {hint}")
    value = row[column]
    if not isinstance(value, str) or not (value.strip() or empty):
        raise DataError(f"{where}, column {column!r}: is {str(value)[:40]!r}; text is needed")
    return value


def _day(row: Mapping[str, Any], where: str) -> date:
    text = _text(row, "contest_date", where)
    try:
        return datetime.fromisoformat(text).date()
    except ValueError as error:
        raise DataError(f"{where}, column 'contest_date': {text[:40]!r} is no ISO date") from error
