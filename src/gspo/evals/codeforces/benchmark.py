"""The benchmarks ``codeforces`` and ``own-contests``: contests, judged samples, a rating."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, DataError
from gspo.evals.benchmark import (
    Answer,
    Benchmark,
    Figure,
    Findings,
    Grade,
    Grader,
    Imported,
    Options,
    Problem,
    ProblemResult,
    ResultTable,
    SamplingProtocol,
)
from gspo.evals.codeforces.contest import NEWCOMER_RATING, Contest
from gspo.evals.codeforces.files import Files, Task, read_files
from gspo.evals.codeforces.scoring import PACES, Pace, Samples
from gspo.evals.codeforces.summary import Rating, Results, rate, rate_problems
from gspo.evals.elo import Bound, RatingEstimate

#: What the API calls the end of a submission. Everything else is no verdict of the program's.
_PASSED = ("OK",)
_FAILED = (
    "WRONG_ANSWER", "PRESENTATION_ERROR", "TIME_LIMIT_EXCEEDED", "MEMORY_LIMIT_EXCEEDED", "IDLENESS_LIMIT_EXCEEDED",
    "RUNTIME_ERROR", "COMPILATION_ERROR", "CHALLENGED", "PARTIAL", "REJECTED",
)  # fmt: skip
_JUDGES = ("tests", "verdicts")
_BOUND_WORDS: Mapping[Bound, str] = {
    "": "",
    "lower": "a lower bound: in a contest the samples come first",
    "upper": "an upper bound: in a contest the samples come last",
    "both": "no estimate: in a contest the samples come first, in another last",
}
_OPTIONS = {
    "judge": "tests (default): samples are programs, run against the tests in the files; verdicts: samples are the "
    "verdicts that Codeforces gave, as its API names them",
    "attempts": "the most samples sent to one problem (default: all)",
    "pace": "when an accepted sample arrives: instant (default, the start of the contest) or field (when the median of "
    "the solvers had solved it)",
    "newcomers": f"the rating of contestants whose rating before the contest is 0 (default {NEWCOMER_RATING})",
}


@dataclass(frozen=True)
class ContestsImported(Imported):
    """With the contests themselves, which the rating needs."""

    contests: tuple[Contest, ...] = ()


def read_contests(paths: Sequence[Path], options: Options) -> ContestsImported:
    """Contests and problems of the user's files."""
    _check_options(options)
    files = read_files(paths, _whole(options, "newcomers", NEWCOMER_RATING) or 0)
    judge = options.get("judge", "tests")
    if judge == "tests" and not files.tasks:
        raise DataError(
            "the files hold no problem with tests; add JSON lines with contestId, index, prompt and tests, or bring "
            "the verdicts of Codeforces itself as samples: --option judge=verdicts"
        )
    problems = _asked(files.tasks) if judge == "tests" else _named(files.contests)
    return _imported(files, problems, "answers of the Codeforces API", judge, options)


def read_own(paths: Sequence[Path], options: Options) -> ContestsImported:
    """The made-up contests of this package, with the package's programming problems one after another."""
    from gspo.data.sets import load_set, set_path

    _check_options(options)
    files = read_files([set_path("contests")])
    programs = load_set("programs")
    places = [(contest.id, problem.index) for contest in files.contests for problem in contest.problems]
    tasks = tuple(
        Task(contest_id, index, row["prompt"], row["answer"], row["id"])
        for number, (contest_id, index) in enumerate(places)
        for row in [programs[number % len(programs)]]
    )
    notes = (*files.notes, "made-up contests: they show that everything works, not how good a model is")
    return _imported(Files(files.contests, tasks, notes), _asked(tasks), "own sets", "tests", options)


def _imported(
    files: Files, problems: tuple[Problem, ...], layout: str, judge: str, options: Options
) -> ContestsImported:
    sizes = ", ".join(f"{one.id}: {len(one.problems)} problems, {len(one.field)} rated" for one in files.contests)
    notes = [f"{len(files.contests)} contests ({sizes})", *files.notes]
    asked = {(task.contest_id, task.index) for task in files.tasks}
    missing = [f"{c.id}/{p.index}" for c in files.contests for p in c.problems if (c.id, p.index) not in asked]
    if judge == "tests" and missing:
        notes.append(f"{len(missing)} problems have no tests and count as missing: {', '.join(missing[:8])}")
    facts: dict[str, Any] = {"contests": [_facts(contest) for contest in files.contests], "judge": judge}
    facts |= {"attempts": _whole(options, "attempts", None), "pace": _pace(options)}
    return ContestsImported(problems, layout, tuple(notes), facts, files.contests)


def _facts(contest: Contest) -> dict[str, Any]:
    """What a result says of a contest; the digest covers all that its rating depends on."""
    return {
        "id": contest.id,
        "name": contest.name,
        "scoring": contest.scoring,
        "penalty_minutes": contest.penalty_minutes,
        "num_problems": len(contest.problems),
        "num_rated": len(contest.field),
        "sha256": hashlib.sha256(repr(contest).encode()).hexdigest(),
    }


def _asked(tasks: Sequence[Task]) -> tuple[Problem, ...]:
    return tuple(
        Problem(f"{task.contest_id}/{task.index}", task.prompt, task.answer, task.where, columns=_columns(task))
        for task in tasks
    )


def _columns(task: Task) -> dict[str, Any]:
    return {"contestId": task.contest_id, "index": task.index}


def _named(contests: Sequence[Contest]) -> tuple[Problem, ...]:
    """Problems that are judged elsewhere: nothing to ask, nothing to run."""
    return tuple(
        Problem(
            f"{c.id}/{p.index}",
            f"{c.name}, problem {p.index}",
            None,
            c.name,
            columns={"contestId": c.id, "index": p.index},
        )
        for c in contests
        for p in c.problems
    )


class VerdictGrader:
    """Samples that are the verdicts of Codeforces: OK passes."""

    policy: Mapping[str, Any] = {"verifier": "verdicts of Codeforces", "passed": list(_PASSED), "failed": list(_FAILED)}

    def grade(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[Grade]:
        return [self._grade(answer.text.strip()) for answer in answers]

    def _grade(self, word: str) -> Grade:
        if word in _PASSED or word in _FAILED:
            return Grade(float(word in _PASSED), word.lower().replace("_", " "))
        return Grade(None, "no verdict", f"{word[:40]!r} is not a final verdict of the Codeforces API", answered=False)

    def close(self) -> None:
        """Nothing to end."""


def make_grader(options: Options, imported: Imported) -> Grader:
    """Programs in boxes, or the user's verdicts."""
    if options.get("judge", "tests") == "verdicts":
        return VerdictGrader()
    from gspo.evals.graders import CodeGrader
    from gspo.sandbox import open_sandbox

    return CodeGrader(open_sandbox())


def finish(results: Sequence[ProblemResult], imported: Imported, options: Options) -> Findings:
    """The ratings."""
    assert isinstance(imported, ContestsImported)
    samples, attempts = samples_of(results), _whole(options, "attempts", None)
    if not any(one.num_samples for one in samples.values()):
        return Findings(notes=("no sample could be graded: there is no rating",))
    pace = _pace(options)
    ratings = {name: rate(imported.contests, samples, name, attempts) for name in PACES}
    by_problems = rate_problems(imported.contests, samples)
    main, other = ratings[pace], next(ratings[name] for name in PACES if name != pace)
    other_pace = next(name for name in PACES if name != pace)
    metrics: dict[str, Any] = {**_metrics("elo", main.estimate), f"elo/{other_pace}_pace": other.estimate.rating}
    metrics |= {"elo/num_contests": len(main.contests), "elo/first": main.first, "elo/last": main.last}
    metrics |= {"elo/if_missing_solved": main.if_missing_solved, f"elo/{pace}_pace": main.estimate.rating}
    figures = [
        Figure("Elo", _text(main.estimate), _note(main, pace)),
        Figure(f"Elo at {other_pace} pace", _text(other.estimate), _note(other, other_pace)),
    ]
    if by_problems is not None:
        metrics |= _metrics("elo_by_problems", by_problems)
        note = f"{_interval(by_problems)}one sample against problems of known rating, by maximum likelihood"
        figures.append(Figure("Elo by problems", _text(by_problems), note))
    return Findings(metrics, tuple(figures), (_table(ratings),), tuple(_notes(main)))


def samples_of(results: Sequence[ProblemResult]) -> Results:
    """Graded samples by contest and problem; a sample that could not be graded is none."""
    found: defaultdict[tuple[int, str], Samples] = defaultdict(lambda: Samples(0, 0))
    for result in results:
        graded = [grade.value for grade in result.grades if grade.value is not None]
        key = (int(result.problem.columns["contestId"]), str(result.problem.columns["index"]))
        found[key] = Samples(len(graded), sum(value >= 1 for value in graded))
    return dict(found)


def _metrics(name: str, estimate: RatingEstimate) -> dict[str, Any]:
    """Infinite ends are None: JSON has no infinity."""
    low, high = (None if math.isinf(end) else end for end in (estimate.low, estimate.high))
    return {name: estimate.rating, f"{name}/low": low, f"{name}/high": high, f"{name}/bound": estimate.bound}


def _text(estimate: RatingEstimate) -> str:
    sign = {"lower": "≥ ", "upper": "≤ "}.get(estimate.bound, "")
    return f"{sign}{estimate.rating:.0f}"


def _interval(estimate: RatingEstimate) -> str:
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return ""
    return f"{estimate.low:.0f} to {estimate.high:.0f}, {100 * estimate.confidence:g} %; "


def _note(rating: Rating, pace: Pace) -> str:
    words = f"{_interval(rating.estimate)}mean of {len(rating.contests)} contests, {pace} pace"
    return f"{words}; {_BOUND_WORDS[rating.estimate.bound]}" if rating.estimate.bound else words


def _notes(rating: Rating) -> list[str]:
    notes = []
    if rating.estimate.bound:
        notes.append(
            f"The Elo rating is {_BOUND_WORDS[rating.estimate.bound]} ({rating.first:.1%} of places are first, "
            f"{rating.last:.1%} last); there the seed equation is solved half a place inside."
        )
    missing = sum(len(one.missing) for one in rating.contests)
    if missing:
        notes.append(
            f"{missing} problems have no graded sample and count as not solved; solved at once, they would give "
            f"{rating.if_missing_solved:.0f}."
        )
    return notes


def _table(ratings: Mapping[Pace, Rating]) -> ResultTable:
    rows = tuple(
        (
            one.contest.name,
            len(one.contest.field),
            round(one.place.solved, 2),
            len(one.contest.problems),
            round(one.place.rank, 2),
            round(one.place.rating),
            round(other.place.rating),
            one.place.bound or "-",
        )
        for one, other in zip(ratings["instant"].contests, ratings["field"].contests, strict=True)
    )
    columns = ("contest", "rated", "solved", "problems", "rank", "rating, instant", "rating, field", "bound")
    return ResultTable("Contests", "Expected over the order of the samples.", columns, rows)


def _check_options(options: Options) -> None:
    judge = options.get("judge", "tests")
    if judge not in _JUDGES:
        raise ConfigError(f"there is no judge {judge!r}; there are {', '.join(_JUDGES)}")
    _pace(options)
    _whole(options, "attempts", None)


def _pace(options: Options) -> Pace:
    for name in PACES:
        if options.get("pace", "instant") == name:
            return name
    raise ConfigError(f"there is no pace {options['pace']!r}; there are {', '.join(PACES)}")


def _whole(options: Options, name: str, default: int | None) -> int | None:
    text = options.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"option {name} is {text!r}; a whole number of at least 1 is needed")
    return int(text)


CODEFORCES = Benchmark(
    name="codeforces",
    title="Codeforces",
    protocol=SamplingProtocol(num_samples=8, max_new_tokens=32_768),
    read=read_contests,
    make_grader=make_grader,
    option_names=_OPTIONS,
    finish=finish,
)
OWN_CONTESTS = Benchmark(
    name="own-contests",
    title="Own contests",
    protocol=SamplingProtocol(num_samples=4, max_new_tokens=1024),
    read=read_own,
    make_grader=make_grader,
    option_names={name: _OPTIONS[name] for name in ("attempts", "pace")},
    needs_data=False,
    finish=finish,
)
