"""Runs a benchmark: answers, grades, statistics, one JSON; interrupted, it goes on where it was.

What each file of the directory is: ``samples.jsonl`` and ``grades.jsonl`` (``evals/store.py``), ``evaluation.json``
(``evals/result.py``), written last. The JSON holds no times: the same evaluation, interrupted or not, is the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from gspo.errors import RunDirectoryError
from gspo.evals.benchmark import (
    Answer,
    Benchmark,
    Grade,
    Grader,
    Imported,
    Options,
    Problem,
    ProblemResult,
    answer_from,
    digest,
    fields_of,
    grade_from,
)
from gspo.evals.result import Settings, make_result
from gspo.evals.sampling import Sampler
from gspo.evals.store import Store
from gspo.events import write_json
from gspo.types import StopReason

RESULT = "evaluation.json"
SAMPLES = "samples.jsonl"
GRADES = "grades.jsonl"


#: Problems whose responses go to the grader in one call, between two looks at whether to stop.
GRADED_TOGETHER = 8


class Progress(Protocol):
    """Told how far a phase ("sampling", "judging") is; ``kept`` of the total come from an earlier attempt."""

    def begin(self, phase: str, total: int, kept: int) -> None: ...
    def advance(self, count: int = 1) -> None: ...


class Silent:
    """Progress that nobody watches."""

    def begin(self, phase: str, total: int, kept: int) -> None: ...
    def advance(self, count: int = 1) -> None: ...


def _ignore(message: str) -> None: ...


def _never() -> None: ...


def run(
    benchmark: Benchmark,
    imported: Imported,
    options: Options,
    sampler: Sampler,
    grader: Grader,
    directory: Path,
    *,
    settings: Settings | None = None,
    facts: dict[str, Any] | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], None] = _ignore,
    check_stop: Callable[[], None] = _never,
) -> dict[str, Any]:
    """Answers and grades what is not yet done, writes ``evaluation.json`` and returns its content.

    Args:
        directory: made if it is not there; what it holds must belong to this evaluation.
        facts: recorded in the result besides (files, versions).
        warn: told about damaged lines that are done again.
        check_stop: called where it is safe to end; may raise.

    Raises:
        ConfigError: pass@k with k above the number of samples; before anything is sampled.
        RunDirectoryError: the directory belongs to another evaluation.
    """
    settings = settings or Settings()
    settings.check(sampler.num_samples)
    judge = digest(grader.policy)
    asked = {"benchmark": benchmark.name, "data": imported.digest, **sampler.identity}
    _make(directory)
    with (
        closing(Store(directory / SAMPLES, asked, warn)) as samples,
        closing(Store(directory / GRADES, {**asked, "judge policy": judge}, warn)) as grades,
    ):
        answers = _sample(imported.problems, sampler, samples, progress or Silent(), check_stop)
        judged = _judge(imported.problems, answers, grader, grades, progress or Silent(), check_stop)
    results = [ProblemResult(*cells) for cells in zip(imported.problems, answers, judged, strict=True)]
    identity = {**asked, "judge policy": judge}
    findings = benchmark.finish(results, imported, options)
    result = make_result(benchmark, imported, results, findings, sampler, grader, settings, identity)
    result |= facts or {}
    write_json(directory / RESULT, result)
    return result


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{directory}: cannot be made ({error.strerror}); choose another --out") from error


def _sample(
    problems: Sequence[Problem],
    sampler: Sampler,
    store: Store,
    progress: Progress,
    check_stop: Callable[[], None],
) -> list[tuple[Answer, ...]]:
    """The answers to every problem: as they were stored, or sampled now, each problem on the disk once it is whole."""
    open_ = [problem for problem in problems if store.get(problem.id) is None]
    total = len(problems) * sampler.num_samples
    progress.begin("sampling", total, total - len(open_) * sampler.num_samples)

    def on_answers(problem: Problem, answers: tuple[Answer, ...]) -> None:
        store.write(problem.id, answers=[fields_of(answer) for answer in answers])

    def on_response() -> None:
        progress.advance()
        check_stop()

    check_stop()
    if open_:
        sampler.sample(open_, on_answers, on_response)
    return [tuple(map(answer_from, store.known(problem.id)["answers"])) for problem in problems]


def _judge(
    problems: Sequence[Problem],
    answers: Sequence[tuple[Answer, ...]],
    grader: Grader,
    store: Store,
    progress: Progress,
    check_stop: Callable[[], None],
) -> list[tuple[Grade, ...]]:
    """The grades of every answer, as they were stored or judged now."""
    pairs = list(zip(problems, answers, strict=True))
    open_ = [(problem, group) for problem, group in pairs if store.get(problem.id) is None]
    total = sum(len(group) for group in answers)
    progress.begin("judging", total, total - sum(len(group) for _, group in open_))
    for start in range(0, len(open_), GRADED_TOGETHER):
        check_stop()
        part = open_[start : start + GRADED_TOGETHER]
        cells = [(problem, answer) for problem, group in part for answer in group]
        found = iter(_grade(cells, grader))
        for problem, group in part:
            store.write(problem.id, grades=[fields_of(next(found)) for _ in group])
        progress.advance(len(cells))
    return [tuple(map(grade_from, store.known(problem.id)["grades"])) for problem in problems]


def _grade(cells: Sequence[tuple[Problem, Answer]], grader: Grader) -> list[Grade]:
    """One call of the grader; what the engine gave up on is no answer, and is not judged."""
    whole = [cell for cell in cells if cell[1].stop_reason != StopReason.ABORTED]
    judged = iter(grader.grade([problem for problem, _ in whole], [answer for _, answer in whole]) if whole else ())
    aborted = Grade(None, "aborted", "the engine gave up on the response", answered=False)
    return [next(judged) if answer.stop_reason != StopReason.ABORTED else aborted for _, answer in cells]
