"""The benchmark ``livecodebench``: a release, a window of dates, two graders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, DataError
from gspo.evals.benchmark import (
    Benchmark,
    Findings,
    Imported,
    Options,
    Problem,
    ProblemResult,
    ResultTable,
    SamplingProtocol,
)
from gspo.evals.livecodebench.compat import STREAMS, Streams
from gspo.evals.livecodebench.errata import SOURCE, fault_of
from gspo.evals.livecodebench.files import LiveProblem, read_problems
from gspo.evals.livecodebench.grading import LiveCodeGrader
from gspo.evals.livecodebench.release import (
    DEFAULT_FIRST,
    DEFAULT_LAST,
    DEFAULT_RELEASE,
    RELEASES,
    Window,
    check_release,
    expected_count,
    explain_count,
    make_window,
    release_files,
)
from gspo.evals.result import cell_metrics

GRADERS = ("strict", "compat")
_ERRATA = ("keep", "exclude")
_OPTIONS = {
    "release": f"{', '.join(RELEASES)} of code_generation_lite (default {DEFAULT_RELEASE})",
    "from": f"first month or day of the window, included (default {DEFAULT_FIRST})",
    "to": f"last month or day of the window, included (default {DEFAULT_LAST})",
    "num_problems": "how many problems the window must have (default: the published number, where one is known)",
    "errata": "keep (default) or exclude the problems with known faults in their tests; results are given both ways",
    "streams": "standard input of the grader compat: buffered (default, the harness since 2025) or plain (before)",
}
_READS = (
    "Write a Python program that solves this problem. It reads its input from standard input, in the format described, "
    "and writes its answer, and nothing else, to standard output. Give the whole program in one fenced block:\n\n"
    "```python\n# the program\n```"
)
_COMPLETES = (
    "Solve this problem by completing the Python code below. Keep the names and the signature as they are; the code is "
    "called with the arguments of a test and must return the answer. Give the whole code in one fenced block:\n\n"
    "```python\n{starter}\n```"
)


def prompt_of(problem: LiveProblem) -> str:
    """What a model is asked; our own words for what the benchmark's prompt says."""
    task = _COMPLETES.format(starter=problem.starter_code.rstrip()) if problem.starter_code.strip() else _READS
    return f"{problem.statement.strip()}\n\n{task}"


def read_live(paths: Sequence[Path], options: Options) -> Imported:
    """The problems of a release in a window of dates.

    Raises:
        ConfigError: an option that makes no sense.
        DataError: what ``read_problems`` refuses, or another number of problems than the window has.
    """
    release = check_release(options.get("release", DEFAULT_RELEASE))
    window = make_window(options.get("from", DEFAULT_FIRST), options.get("to", DEFAULT_LAST))
    errata = _choice(options, "errata", _ERRATA)
    _choice(options, "streams", STREAMS)
    files, notes = _files(paths, release)
    found, total = read_problems(files, window)
    notes += _check_count(found, total, release, window, options)
    faults = {problem.id: fault for problem in found if (fault := fault_of(problem.id, problem.title))}
    kept = [problem for problem in found if errata == "keep" or problem.id not in faults]
    notes += [
        f"{one.id}: {one.unreadable}; only compat judges it, and no program passes" for one in kept if one.unreadable
    ]
    if faults:
        done = "left out" if errata == "exclude" else "kept; results without them are reported too"
        notes.append(f"known faults in the tests of {', '.join(faults)} ({SOURCE}): {done}")
    facts = {
        "release": release,
        "window": [window.first.isoformat(), window.last.isoformat()],
        "num_in_window": len(found),
        "errata": {"source": SOURCE, "problems": faults, "excluded": errata == "exclude"},
    }
    problems = tuple(_asked(problem) for problem in kept)
    return Imported(problems, "code_generation_lite (test*.jsonl)", tuple(notes), facts)


def _asked(problem: LiveProblem) -> Problem:
    return Problem(
        id=problem.id,
        prompt=prompt_of(problem),
        gold=problem.tests,
        place=problem.where,
        date=problem.day.isoformat(),
        columns={
            "title": problem.title,
            "platform": problem.platform,
            "difficulty": problem.difficulty,
            "function": problem.function,
        },
    )


def _files(paths: Sequence[Path], release: str) -> tuple[list[Path], list[str]]:
    """Files as given; of a directory those of the release."""
    files: list[Path] = []
    notes: list[str] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        here = [path / name for name in release_files(release) if (path / name).is_file()]
        if not here:
            raise DataError(f"{path} has none of the files of release_{release}: {', '.join(release_files(release))}")
        files += here
        notes.append(f"read {', '.join(file.name for file in here)} of {path.name}, as release_{release} has it")
    return files, notes


def _check_count(found: Sequence[LiveProblem], total: int, release: str, window: Window, options: Options) -> list[str]:
    text = options.get("num_problems")
    if text is not None and not text.isdecimal():
        raise ConfigError(f"option num_problems is {text!r}; a whole number is needed")
    expected = int(text) if text is not None else expected_count(release, window)
    said = f"release_{release}, {window}: {len(found)} of {total} problems in the files"
    if expected is None:
        return [f"{said}; how many this window should have is not published, so it was not checked"]
    if len(found) != expected:
        if text is None:
            raise DataError(explain_count(release, window, len(found), expected))
        raise DataError(f"the window {window} has {len(found)} problems in these files, not num_problems = {expected}")
    return [said]


def _choice(options: Options, name: str, known: Sequence[str]) -> str:
    value = options.get(name, known[0])
    if value not in known:
        raise ConfigError(f"option {name} is {value!r}; there are {', '.join(known)}")
    return value


def make_grader(options: Options, imported: Imported) -> LiveCodeGrader:
    """Both graders over one sandbox."""
    from gspo.sandbox import open_sandbox

    streams: Streams = "plain" if _choice(options, "streams", STREAMS) == "plain" else "buffered"
    return LiveCodeGrader(open_sandbox(), streams)


def finish(results: Sequence[ProblemResult], imported: Imported, options: Options) -> Findings:
    """By difficulty and platform, without the errata, and where the two graders disagree."""
    faults = imported.facts["errata"]["problems"]
    sound = [result for result in results if result.problem.id not in faults]
    metrics: dict[str, Any] = {}
    if sound and len(sound) < len(results):
        for name in GRADERS:
            metrics |= {f"{name}/without_errata/{key}": value for key, value in _metrics(sound, name).items()}
    tables = [
        _table("By difficulty", results, lambda result: str(result.problem.columns["difficulty"]) or "unknown"),
        _table("By platform", results, lambda result: str(result.problem.columns["platform"])),
        _agreement(results),
    ]
    return Findings(metrics, tables=tuple(tables), notes=tuple(_notes(results)))


def _metrics(results: Sequence[ProblemResult], grader: str) -> dict[str, float]:
    cells = [[grade.components.get(grader) for grade in result.grades] for result in results]
    return cell_metrics(cells, max((len(row) for row in cells), default=1) or 1)


def _table(title: str, results: Sequence[ProblemResult], group: Callable[[ProblemResult], str]) -> ResultTable:
    rows = []
    for name in sorted({group(result) for result in results}):
        part = [result for result in results if group(result) == name]
        rows.append((name, len(part), *(round(_metrics(part, grader)["pass@1"], 4) for grader in GRADERS)))
    return ResultTable(title, "Mean pass@1.", (title.removeprefix("By "), "problems", *GRADERS), tuple(rows))


def _agreement(results: Sequence[ProblemResult]) -> ResultTable:
    """Responses by the two verdicts."""
    pairs = [tuple(grade.components.get(name) for name in GRADERS) for result in results for grade in result.grades]
    words = {1.0: "pass", 0.0: "fail", None: "unscored"}
    rows = [(words[a], words[b], pairs.count((a, b))) for a in words for b in words if (a, b) in pairs]
    note = "Responses. Where strict passes and compat fails, a fault of the harness is the usual reason."
    return ResultTable("Agreement of the graders", note, ("strict", "compat", "responses"), tuple(rows))


def _notes(results: Sequence[ProblemResult]) -> list[str]:
    absent = sum("No module named" in grade.reason for result in results for grade in result.grades)
    if not absent:
        return []
    return [f"Responses that fail strict because they import a package, which boxes do not have: {absent}."]


LIVECODEBENCH = Benchmark(
    name="livecodebench",
    title="LiveCodeBench",
    protocol=SamplingProtocol(num_samples=8, max_new_tokens=32_768),
    read=read_live,
    make_grader=make_grader,
    option_names=_OPTIONS,
    finish=finish,
)
