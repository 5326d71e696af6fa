"""Contests and their problems from files.

Read, in any number of files or directories, told apart by what they hold:

* answers of the API, ``contest.standings`` and ``contest.ratingChanges``, one JSON document each, as they came;
* JSON lines with both in one object: ``contest``, ``problems``, ``rows``, ``ratingChanges``;
* JSON lines with one problem each: ``contestId``, ``index``, ``prompt``, and its tests: an ``answer`` in the form of
  the reward ``code``, or the keys of that form (``tests``, ``checker``, ``cpu_s``, ...) beside the others;
* the data set open-r1/codeforces, JSON lines or Parquet (see ``open_r1``); of it the problems of these contests.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import DataError
from gspo.evals.codeforces import open_r1
from gspo.evals.codeforces.contest import NEWCOMER_RATING, Contest, read_contest, whole
from gspo.evals.tables import read_records
from gspo.rewards.problems import read_problem

_LINES = (".jsonl", ".ndjson")
_KNOWN = (".json", ".parquet", *_LINES)
_PROBLEM_KEYS = ("contestId", "index", "prompt", "answer", "name", "rating", "date", "id")


@dataclass(frozen=True)
class Document:
    """One JSON document, and where it stands."""

    value: Any
    where: str


@dataclass(frozen=True)
class Task:
    """What a model is asked in a contest: a statement and tests."""

    contest_id: int
    index: str
    prompt: str
    answer: Mapping[str, Any]  # for the reward ``code``
    where: str


@dataclass(frozen=True)
class Files:
    """All that the files hold."""

    contests: tuple[Contest, ...]
    tasks: tuple[Task, ...]
    notes: tuple[str, ...]


def read_files(paths: Sequence[Path], newcomer_rating: int = NEWCOMER_RATING) -> Files:
    """Contests, in the order of their ids, and problems with tests.

    Raises:
        DataError: a document that is none of the above, standings without rating changes or the other way round, a
            contest or a problem twice, a problem of a contest that is not there, or what ``read_contest`` refuses.
    """
    standings: dict[int, tuple[Any, str]] = {}
    changes: dict[int, tuple[Any, str]] = {}
    tasks: list[Task] = []
    foreign: list[Document] = []
    for document in (one for path in paths for one in documents(path)):
        value = _answer(document)
        if isinstance(value, Mapping) and "rows" in value:
            contest_id = _contest_id(value.get("contest"), "id", document.where)
            _add(standings, contest_id, value, document.where, "standings")
            if "ratingChanges" in value:
                _add(changes, contest_id, value["ratingChanges"], document.where, "rating changes")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping) and "oldRating" in value[0]:
            contest_id = _contest_id(value[0], "contestId", document.where)
            _add(changes, contest_id, value, document.where, "rating changes")
        elif open_r1.is_row(value):
            foreign.append(Document(value, document.where))
        elif isinstance(value, Mapping) and "contestId" in value and "index" in value:
            tasks.append(_task(value, document.where))
        else:
            raise DataError(
                f"{document.where}: {_shown(value)} is neither standings, nor rating changes, nor a problem"
            )
    contests = tuple(_contests(standings, changes, newcomer_rating))
    found, said = _open_r1(foreign, {contest.id for contest in contests})
    tasks += found
    _check_tasks(tasks, contests)
    notes = said + [f"contest {one.id} ({one.name}): {note}" for one in contests for note in one.notes]
    return Files(contests, tuple(tasks), tuple(notes))


def documents(path: Path) -> Iterator[Document]:
    """The JSON documents (or rows) of a file, or of all such files of a directory, in order of their names.

    Raises:
        DataError: nothing there, not UTF-8, or not JSON (with line and column).
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in _KNOWN)
        if not files:
            raise DataError(f"{path} has no file of {', '.join(_KNOWN)}")
        for file in files:
            yield from documents(file)
        return
    if path.suffix.lower() == ".parquet":
        yield from (Document(record.values, record.place) for record in read_records(path))
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if path.suffix.lower() not in _LINES:
        yield Document(_parse(text, path, 1), path.name)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Document(_parse(line, path, number), f"{path.name}, line {number}")


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {line + error.lineno - 1}, column {error.colno}"
        raise DataError(f"{path}, {at}: is not JSON ({error.msg}); it starts with {text[:30]!r}") from error
    except RecursionError as error:
        raise DataError(f"{path}, line {line}: is nested too deeply") from error


def _answer(document: Document) -> Any:
    """What the API answered, out of its envelope."""
    value = document.value
    if not isinstance(value, Mapping) or "status" not in value:
        return value
    if value["status"] != "OK" or "result" not in value:
        comment = value.get("comment", "no comment")
        raise DataError(f"{document.where}: the API answered {value['status']!r} ({comment}); ask it again")
    return value["result"]


def _contest_id(value: Any, name: str, where: str) -> int:
    if not isinstance(value, Mapping) or name not in value:
        raise DataError(f"{where}: says of no contest; {name!r} is missing")
    return whole(value[name], name, where)


def _add(found: dict[int, tuple[Any, str]], contest_id: int, value: Any, where: str, what: str) -> None:
    if contest_id in found:
        raise DataError(f"{where}: {what} of contest {contest_id}, which {found[contest_id][1]} has too")
    found[contest_id] = (value, where)


def _contests(
    standings: Mapping[int, tuple[Any, str]], changes: Mapping[int, tuple[Any, str]], newcomer_rating: int
) -> Iterator[Contest]:
    if not standings:
        raise DataError("the files hold no standings (the API's contest.standings, all rows)")
    for contest_id in sorted({*standings, *changes}):
        if contest_id not in changes:
            raise DataError(f"{standings[contest_id][1]}: contest {contest_id} has no rating changes in these files")
        if contest_id not in standings:
            raise DataError(f"{changes[contest_id][1]}: contest {contest_id} has no standings in these files")
        table, where = standings[contest_id]
        rated, other = changes[contest_id]
        place = where if where == other else f"{where} with {other}"
        yield read_contest(table, rated, place, newcomer_rating=newcomer_rating)


def _task(value: Mapping[str, Any], where: str) -> Task:
    contest_id, index = whole(value["contestId"], "contestId", where), str(value["index"])
    prompt = value.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{where}: problem {contest_id}/{index} has no 'prompt', the statement that a model reads")
    answer = value.get("answer", {name: part for name, part in value.items() if name not in _PROBLEM_KEYS})
    try:
        read_problem(answer)
        answer = json.loads(answer) if isinstance(answer, str) else answer
    except DataError as error:
        raise DataError(f"{where}: problem {contest_id}/{index}: {error}") from error
    return Task(contest_id, index, prompt, answer, where)


def _open_r1(rows: Sequence[Document], contests: set[int]) -> tuple[list[Task], list[str]]:
    """The problems of these contests, and what is said of the rest."""
    tasks, unfit, elsewhere = [], Counter[str](), 0
    for row in rows:
        if str(row.value["contest_id"]) not in map(str, contests):
            elsewhere += 1
            continue
        problem, why = open_r1.problem_of(row.value, row.where)
        if problem is None:
            unfit[why] += 1
        else:
            tasks.append(_task(problem, row.where))
    if not rows:
        return [], []
    left = [f"{count} not taken ({why})" for why, count in unfit.items()]
    left += [f"{elsewhere} of other contests"] if elsewhere else []
    return tasks, ["; ".join([f"open-r1/codeforces: {len(tasks)} problems with their official tests", *left])]


def _check_tasks(tasks: Sequence[Task], contests: Sequence[Contest]) -> None:
    known = {(contest.id, problem.index) for contest in contests for problem in contest.problems}
    seen: dict[tuple[int, str], str] = {}
    for task in tasks:
        key = (task.contest_id, task.index)
        if key not in known:
            raise DataError(f"{task.where}: problem {key[0]}/{key[1]} belongs to no contest of these files")
        if key in seen:
            raise DataError(f"{task.where}: problem {key[0]}/{key[1]} stands in {seen[key]} too")
        seen[key] = task.where


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(repr, list(value)[:6])) or 'nothing'}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
