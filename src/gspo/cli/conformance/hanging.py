"""Cases about rewards that hang: verdicts inside a time limit, from wherever they are asked for."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gspo.cli.conformance.implementation import Implementation, Judge
from gspo.cli.conformance.model import AnyShape, Case, Check, ExactShape, Sentence, raised, unchecked

Pairs = Sequence[tuple[str, str]]
JudgeFactory = Callable[[float, int], AbstractContextManager[Judge]]
#: Starting a worker, or an interpreter, is not part of any limit.
START_SECONDS = 120.0
_EASY = ("1", "\\boxed{1}")


@dataclass(frozen=True)
class _Answer:
    value: Any  # what a call returned, or a sentence on why it did not
    seconds: float
    returned: bool


def _watched(call: Callable[[], Any], limit_seconds: float) -> _Answer:
    """Calls in a thread. What does not return is left behind: there is no way to end it from inside the process."""
    box: list[_Answer] = []
    start = time.perf_counter()

    def target() -> None:
        try:
            value, returned = call(), True
        except Exception as error:  # anybody's code; what it raises is its answer
            value, returned = raised(error), False
        box.append(_Answer(value, time.perf_counter() - start, returned))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    return box[0] if box else _Answer(f"did not return within {limit_seconds:g} s", limit_seconds, False)


def _time_limited(case: Case, tested: Implementation) -> list[Check]:
    pairs = [(str(gold), str(response)) for gold, response in case.input["items"]]
    limit = float(case.input["limit_seconds"])
    wanted = case.expected.get("verdicts")
    if not isinstance(wanted, list) or len(wanted) != len(pairs):
        return [unchecked("verdicts")]
    sentence = Sentence(str(case.expected.get("total_wall_seconds", "")))
    checks: list[Check] = []
    for label, workers, bound in _bounds(sentence, limit, len(pairs)):
        checks += _one_by_one(case, tested, pairs, (label, workers, bound), wanted)
    checks += [unchecked(f"total_wall_seconds/{part}") for part in sentence.left()]
    if any(check.right is False for check in checks):
        return [*checks, *(unchecked(name) for name in ("call_from",) if name in case.input)]
    return checks + _callers(case, tested, pairs, limit, wanted)


def _bounds(sentence: Sentence, limit: float, count: int) -> list[tuple[str, int, float]]:
    """(name, workers, seconds) of ``at most 5 x limit + 5 run one by one, at most limit + 5 with 5 workers``."""
    bounds = []
    while found := sentence.take(r"at most (?:(\d+) x )?limit \+ (\d+)(?: s)? (run one by one|with (\d+) workers?)"):
        seconds = int(found[1] or 1) * limit + int(found[2])
        bounds.append((found[3], int(found[4] or 1), seconds))
    return bounds or [("run one by one", 1, count * limit + 5)]


def _one_by_one(
    case: Case, tested: Implementation, pairs: Pairs, bound: tuple[str, int, float], wanted: Sequence[bool | None]
) -> list[Check]:
    """Verdicts and seconds with a number of workers, twice; the workers are started before."""
    label, workers, seconds = bound
    limit = float(case.input["limit_seconds"])
    with tested.math_judge(limit, workers) as judge:
        started = _watched(lambda: judge([_EASY] * workers), START_SECONDS)
        if not started.returned:
            return [Check(f"verdicts/{label}, first answer", False, started.value, "a verdict")]
        before = _resident_mb()
        first = _watched(lambda: judge(pairs), seconds)
        right = first.returned and _same(first.value, wanted)
        checks = [Check(f"verdicts/{label}", right, first.value, list(wanted))]
        if not first.returned:
            return checks
        if "total_wall_seconds" in case.expected:
            took = f"total_wall_seconds/{label}"
            checks.append(Check(took, first.seconds <= seconds, first.seconds, f"at most {seconds:g}"))
        after = Sentence(str(case.expected.get("after", "")))
        if after.take("a second call right after gives the same verdicts"):
            second = _watched(lambda: judge(pairs), seconds)
            right = second.returned and _same(second.value, first.value)
            checks.append(Check(f"after/second call, {label}", right, second.value, first.value))
        if found := after.take(r"resident memory of the trainer grows by less than (\d+) MB"):
            checks.append(_memory_check(label, before, float(found[1])))
    return [*checks, *(unchecked(f"after/{part}") for part in after.left())]


def _same(got: Any, wanted: Any) -> bool:
    """The same verdicts; 1 is not True."""
    return isinstance(got, list) and len(got) == len(wanted) and all(g is w for g, w in zip(got, wanted, strict=True))


def _resident_mb() -> float | None:
    """Of this process; None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else None


def _memory_check(label: str, before: float | None, most: float) -> Check:
    now = _resident_mb()
    name = f"after/resident memory, {label}"
    if before is None or now is None:
        return unchecked(name)
    return Check(name, now - before < most, now - before, f"less than {most:g} MB")


def _callers(
    case: Case, tested: Implementation, pairs: Pairs, limit: float, wanted: Sequence[bool | None]
) -> list[Check]:
    """The same verdicts from the main thread, a thread, a task and another process."""
    named = case.input.get("call_from", [])
    checks: list[Check] = []
    bound = len(pairs) * limit + START_SECONDS
    with tested.math_judge(limit, 1) as judge:
        calls: dict[str, Callable[[], _Answer]] = {
            "worker thread": lambda: _watched(lambda: judge(pairs), bound),
            "asyncio task": lambda: _watched(lambda: asyncio.run(_in_task(judge, pairs)), bound),
            "spawned process": lambda: _spawned(tested.math_judge, limit, pairs, bound),
            # Cannot be watched: last, and only after the others came back.
            "main thread": lambda: _called_here(judge, pairs),
        }
        for name, call in calls.items():
            if name not in named or any(not isinstance(check.got, list) for check in checks):
                continue
            answer = call()
            if answer.value is None:
                checks.append(unchecked(f"call_from/{name} (cannot be sent to it)"))
            else:
                checks.append(Check(f"verdicts/from {name}", _same(answer.value, wanted), answer.value, list(wanted)))
    return [*checks, *(unchecked(f"call_from/{name}") for name in named if name not in calls)]


def _called_here(judge: Judge, pairs: Pairs) -> _Answer:
    start = time.perf_counter()
    try:
        return _Answer(judge(pairs), time.perf_counter() - start, True)
    except Exception as error:  # as in _watched
        return _Answer(raised(error), time.perf_counter() - start, False)


async def _in_task(judge: Judge, pairs: Pairs) -> list[bool | None]:
    async def task() -> list[bool | None]:
        return judge(pairs)

    return await asyncio.create_task(task())


def _spawned(factory: JudgeFactory, limit: float, pairs: Pairs, bound: float) -> _Answer:
    """In a fresh process; the value is None for a judge that cannot be sent there."""
    start = time.perf_counter()
    try:
        pickle.dumps(factory)
    except (pickle.PicklingError, AttributeError, TypeError):
        return _Answer(None, 0.0, False)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer_there, args=(theirs, factory, limit, list(pairs)))
    process.start()
    theirs.close()
    value: Any = f"did not return within {bound:g} s"
    try:
        if mine.poll(bound):
            value = mine.recv()
    except EOFError:
        value = "ended without an answer"
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    return _Answer(value, time.perf_counter() - start, isinstance(value, list))


def _answer_there(answer: Connection, factory: JudgeFactory, limit: float, pairs: Pairs) -> None:
    """Runs in the spawned process."""
    try:
        with factory(limit, 1) as judge:
            answer.send(judge(pairs))
    except Exception as error:  # the parent reports it
        answer.send(raised(error))


HANGING_SHAPES: tuple[AnyShape, ...] = (ExactShape(frozenset({"items", "limit_seconds"}), _time_limited),)
