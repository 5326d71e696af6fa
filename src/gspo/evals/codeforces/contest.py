"""A finished, rated contest as the answers of the Codeforces API describe it, checked.

Two answers make a contest: ``contest.standings`` (contest, problems, rows) and ``contest.ratingChanges``. The field is
the contestants whom the contest rated; who took part out of competition, as a virtual or ghost party, or without a
rating is left out, and places are counted again among the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo.errors import DataError

Scoring = Literal["ICPC", "CF"]
#: Codeforces shows 0 as the rating before the first contest; its rating system starts everyone here.
NEWCOMER_RATING = 1400
#: Minutes per rejected attempt where the standings cannot tell: the rule of Codeforces' own ICPC rounds.
USUAL_PENALTY = 10
REJECTED_POINTS = 50.0  # per rejected attempt, where problems have points


@dataclass(frozen=True)
class ContestProblem:
    """One problem of a contest."""

    index: str  # "A", "B1", ...
    points: float  # the most it can give: 1 under ICPC rules
    rating: int | None  # its difficulty, where known


@dataclass(frozen=True)
class Solve:
    """How one contestant solved one problem."""

    minute: int
    rejected: int
    points: float


@dataclass(frozen=True)
class Contestant:
    """One rated contestant."""

    handle: str
    rating: int  # before the contest
    points: float
    penalty: int
    solves: Mapping[str, Solve]  # by problem index


@dataclass(frozen=True)
class Contest:
    """One contest and its field."""

    id: int
    name: str
    scoring: Scoring
    duration_minutes: int
    penalty_minutes: int  # per rejected attempt; 0 where problems have points
    problems: tuple[ContestProblem, ...]
    field: tuple[Contestant, ...]
    notes: tuple[str, ...] = ()  # what was left out or assumed


def read_contest(standings: Any, changes: Any, where: str, *, newcomer_rating: int = NEWCOMER_RATING) -> Contest:
    """The contest of two API answers (their ``result``, or the whole answer with its ``status``).

    Args:
        standings: of ``contest.standings``, all rows of it.
        changes: of ``contest.ratingChanges``.
        where: file (and line), for messages.
        newcomer_rating: stands for a rating of 0 before the contest.

    Raises:
        DataError: an answer that failed, a contest that is not finished or not rated, rows that are not the whole
            standings, ranks that contradict points, or a value that cannot be; the message says where.
    """
    table, rated = _result(standings, "standings", where), _result(changes, "ratingChanges", where)
    contest = _mapping(_get(table, "contest", where), "contest", where)
    scoring, problems = _scoring(contest, where), _problems(table, where)
    ratings = _ratings(rated, contest, where)
    rows = [_row(row, number, problems, where) for number, row in enumerate(_list(table, "rows", where), 1)]
    official = [row for row in rows if row is not None]
    _check_ranks(official, where)
    field = tuple(_contestant(row, ratings, newcomer_rating) for row in official if row.handle in ratings)
    _check_whole(field, ratings, where)
    penalty, note = _penalty(field, where) if scoring == "ICPC" else (0, "")
    newcomers = sum(ratings[one.handle] == 0 for one in field)
    notes = [
        note,
        f"{len(rows) - len(official)} rows out of competition left out" if len(rows) > len(official) else "",
        f"{len(official) - len(field)} unrated contestants left out" if len(official) > len(field) else "",
        f"{newcomers} newcomers taken as {newcomer_rating}" if newcomers else "",
    ]
    name = str(contest.get("name", contest["id"]))
    duration = whole(_get(contest, "durationSeconds", where), "durationSeconds", where)
    return Contest(contest["id"], name, scoring, duration // 60, penalty, problems, field, tuple(filter(None, notes)))


@dataclass(frozen=True)
class _Row:
    handle: str
    rank: int
    points: float
    penalty: int
    solves: Mapping[str, Solve]
    where: str


def _result(answer: Any, name: str, where: str) -> Any:
    if isinstance(answer, Mapping) and "status" in answer:
        if answer["status"] != "OK":
            raise DataError(f"{where}: the API answered {answer['status']!r} ({answer.get('comment', 'no comment')})")
        answer = _get(answer, "result", where)
    if not isinstance(answer, Mapping if name == "standings" else Sequence) or isinstance(answer, str):
        raise DataError(f"{where}: {name} is {type(answer).__name__}; give the API's answer as it came")
    return answer


def _scoring(contest: Mapping[str, Any], where: str) -> Scoring:
    whole(_get(contest, "id", where), "contest.id", where)
    phase = contest.get("phase", "FINISHED")
    if phase != "FINISHED":
        raise DataError(f"{where}: contest {contest['id']} is in phase {phase!r}; only a finished one has a result")
    kind = _get(contest, "type", where)
    if kind == "ICPC":
        return "ICPC"
    if kind == "CF":
        return "CF"
    raise DataError(f"{where}: contest {contest['id']} has scoring {kind!r}; ICPC and CF are known")


def _problems(table: Mapping[str, Any], where: str) -> tuple[ContestProblem, ...]:
    problems = []
    for number, value in enumerate(_list(table, "problems", where), 1):
        at = f"{where}, problem {number}"
        problem = _mapping(value, "a problem", at)
        rating = problem.get("rating")
        points = number_of(problem.get("points", 1.0), "points", at)
        if not points > 0:
            raise DataError(f"{at}: points is {points:g}; a problem gives something")
        index = str(_get(problem, "index", at))
        problems.append(ContestProblem(index, points, None if rating is None else whole(rating, "rating", at)))
    doubles = [index for index, count in Counter(problem.index for problem in problems).items() if count > 1]
    if doubles:
        raise DataError(f"{where}: two problems have the index {doubles[0]!r}")
    return tuple(problems)


def _ratings(changes: Sequence[Any], contest: Mapping[str, Any], where: str) -> dict[str, int]:
    ratings: dict[str, int] = {}
    for number, value in enumerate(changes, 1):
        at = f"{where}, rating change {number}"
        change = _mapping(value, "a rating change", at)
        if change.get("contestId", contest["id"]) != contest["id"]:
            raise DataError(f"{at}: is of contest {change['contestId']}, the standings are of {contest['id']}")
        handle = str(_get(change, "handle", at))
        if handle in ratings:
            raise DataError(f"{at}: {handle!r} has two rating changes")
        ratings[handle] = whole(_get(change, "oldRating", at), "oldRating", at)
    if not ratings:
        raise DataError(f"{where}: there are no rating changes; contest {contest['id']} was not rated (yet)")
    return ratings


def _row(value: Any, number: int, problems: Sequence[ContestProblem], where: str) -> _Row | None:
    """One row of the standings; None for a party that is not in the contest proper."""
    at = f"{where}, row {number}"
    row = _mapping(value, "a row", at)
    party = _mapping(_get(row, "party", at), "party", at)
    if party.get("participantType", "CONTESTANT") != "CONTESTANT" or party.get("ghost"):
        return None
    members = _list(party, "members", at)
    handle = str(_get(_mapping(members[0], "a member", at), "handle", at))
    if len(members) > 1:
        raise DataError(f"{at}: {handle!r} is one of a team of {len(members)}; ratings are of single contestants")
    results = _list(row, "problemResults", at)
    if len(results) != len(problems):
        raise DataError(f"{at}: {handle!r} has {len(results)} problem results and there are {len(problems)} problems")
    solves = {
        problem.index: solve
        for problem, result in zip(problems, results, strict=True)
        if (solve := _solve(result, f"{at}, problem {problem.index}")) is not None
    }
    points = number_of(_get(row, "points", at), "points", at)
    rank, penalty = (whole(_get(row, name, at), name, at) for name in ("rank", "penalty"))
    return _Row(handle, rank, points, penalty, solves, at)


def _solve(value: Any, at: str) -> Solve | None:
    result = _mapping(value, "a problem result", at)
    points = number_of(_get(result, "points", at), "points", at)
    rejected = whole(result.get("rejectedAttemptCount", 0), "rejectedAttemptCount", at)
    if rejected < 0 or points < 0:
        raise DataError(f"{at}: points {points:g} and rejectedAttemptCount {rejected} cannot be negative")
    if not points:
        return None
    if result.get("type", "FINAL") != "FINAL":
        raise DataError(f"{at}: the result is {result['type']!r}; system tests are not over")
    seconds = whole(_get(result, "bestSubmissionTimeSeconds", at), "bestSubmissionTimeSeconds", at)
    return Solve(seconds // 60, rejected, points)


def _check_ranks(rows: Sequence[_Row], where: str) -> None:
    """One plus the number of those strictly better: what ranks must be, and what this module computes for a model."""
    handles = Counter(row.handle for row in rows)
    if not rows:
        raise DataError(f"{where}: the standings have no contestant")
    if max(handles.values()) > 1:
        raise DataError(f"{where}: {handles.most_common(1)[0][0]!r} has two rows")
    better = 0
    ordered = sorted(rows, key=lambda row: (-row.points, row.penalty))
    for place, row in enumerate(ordered):
        if place and (row.points, row.penalty) != (ordered[place - 1].points, ordered[place - 1].penalty):
            better = place
        if row.rank != better + 1:
            raise DataError(
                f"{row.where}: {row.handle!r} has rank {row.rank}, but {better} rows are strictly better in points and "
                "penalty; the standings are incomplete (ask for all rows) or were edited"
            )


def _check_whole(field: Sequence[Contestant], ratings: Mapping[str, int], where: str) -> None:
    seen = {one.handle for one in field}
    missing = [handle for handle in ratings if handle not in seen]
    if missing:
        raise DataError(
            f"{where}: {len(missing)} of {len(ratings)} rated contestants have no row ({missing[0]!r} first); the "
            "standings are a part, ask the API for all rows"
        )
    if len(field) < 2:
        raise DataError(f"{where}: the field has {len(field)} contestant; a place needs at least two")


def _contestant(row: _Row, ratings: Mapping[str, int], newcomer_rating: int) -> Contestant:
    return Contestant(row.handle, ratings[row.handle] or newcomer_rating, row.points, row.penalty, row.solves)


def _penalty(field: Sequence[Contestant], where: str) -> tuple[int, str]:
    """Minutes per rejected attempt, from the rows themselves: total penalty minus the minutes, per rejected attempt."""
    found: Counter[int] = Counter()
    for one in field:
        rejected = sum(solve.rejected for solve in one.solves.values())
        rest = one.penalty - sum(solve.minute for solve in one.solves.values())
        if rejected:
            found[rest // rejected if rest % rejected == 0 else -1] += 1
    if not found:
        return USUAL_PENALTY, f"no rejected attempt tells the penalty; {USUAL_PENALTY} minutes taken"
    minutes, count = found.most_common(1)[0]
    if minutes < 0 or count < 0.9 * found.total():
        raise DataError(
            f"{where}: the penalties do not follow the ICPC rule: {count} of {found.total()} rows agree on "
            f"{minutes} minutes per rejected attempt"
        )
    return minutes, ""


def _get(mapping: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in mapping:
        raise DataError(f"{where}: there is no {name!r}; found {', '.join(map(str, list(mapping)[:8])) or 'nothing'}")
    return mapping[name]


def _mapping(value: Any, what: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: {what} is {type(value).__name__}; an object is needed")
    return value


def _list(mapping: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = _get(mapping, name, where)
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {name!r} is {'empty' if value == [] else type(value).__name__}; a list is needed")
    return value


def whole(value: Any, name: str, where: str) -> int:
    """An integer.

    Raises:
        DataError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"{where}: {name} is {value!r}; an integer is needed")
    return value


def number_of(value: Any, name: str, where: str) -> float:
    """A finite number.

    Raises:
        DataError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{where}: {name} is {value!r}; a finite number is needed")
    return float(value)
