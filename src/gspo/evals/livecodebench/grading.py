"""Both graders on one response: ``strict`` is the grade, ``compat`` stands beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

from gspo.evals.benchmark import Answer, Grade, Problem
from gspo.evals.livecodebench.compat import TIMEOUT_S, Streams, fenced_program, judge_compat
from gspo.evals.livecodebench.files import StoredTests, Tests, arguments_of, expected_value
from gspo.rewards.code import extract_program, judge
from gspo.rewards.problems import CodeProblem, CodeTest
from gspo.sandbox import Limits, Sandbox

CPU_S = 6.0
MEMORY_MB = 1024
TOLERANCE = 1e-6
_LEAST_OUTPUT_KB = 4096
#: What LeetCode imports for every program: names with a star, except where they would hide a builtin, then the modules.
_STARS = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "json", "builtins", "typing",
)  # fmt: skip
PRELUDE = "".join(f"from {name} import *\n" for name in _STARS) + "".join(
    f"import {name}\n" for name in (*_STARS, "sys", "io")
)


class LiveCodeGrader:
    """Grades programs twice.

    ``strict``: each test in a fresh box, real streams, processor time, outputs compared as in ``gspo.rewards.output``.
    ``compat``: as LiveCodeBench's own harness would, see ``compat``.
    """

    def __init__(self, sandbox: Sandbox, streams: Streams = "buffered") -> None:
        self.sandbox = sandbox
        self.streams = streams

    @property
    def policy(self) -> Mapping[str, Any]:
        return {
            "strict": {
                "cpu_s": CPU_S,
                "memory_mb": MEMORY_MB,
                "comparison": "lines",
                "tolerance": TOLERANCE,
                "program": "the last closed block fenced as Python after the thinking (gspo.rewards.code)",
            },
            "compat": {
                "timeout_s": TIMEOUT_S,
                "streams": self.streams,
                "program": "the lines between the last two lines with three backticks",
            },
        }

    def grade(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[Grade]:
        """The responses to one problem at a time, so that the tests of one problem are in memory, and no more."""
        grades: list[Grade] = []
        pairs = zip(problems, answers, strict=True)
        with ThreadPoolExecutor(self.sandbox.num_slots, thread_name_prefix="gspo-eval") as threads:
            for _, group in groupby(pairs, key=lambda pair: pair[0].id):
                cells = list(group)
                stored = cells[0][0].gold
                assert isinstance(stored, StoredTests)
                tests = stored.load()
                task = None if tests.unreadable else code_problem(tests)
                grades += threads.map(lambda cell: self._grade(cell[1].text, tests, task), cells)  # noqa: B023
        return grades

    def _grade(self, response: str, tests: Tests, task: CodeProblem | None) -> Grade:
        compat = judge_compat(fenced_program(response), tests, self.sandbox, self.streams)
        there = None if compat.passed is None else float(compat.passed)
        program = extract_program(response)
        if program is None:
            components = {"strict": 0.0, "compat": there}
            return Grade(0.0, "no program", "the response holds no program", answered=False, components=components)
        if task is None:
            reason = f"the tests cannot be judged by: {tests.unreadable}"
            return Grade(None, "unscored", reason, components={"strict": None, "compat": there})
        judgement = judge(program, task, self.sandbox).summary()
        value = None if judgement.correct is None else float(judgement.correct)
        reason = f"{judgement.reason}; compat: {compat.verdict}"
        return Grade(value, judgement.rung, reason, components={"strict": value, "compat": there})

    def close(self) -> None:
        """No box outlives its run."""


def code_problem(tests: Tests) -> CodeProblem:
    """The tests for the grader ``strict``.

    Raises:
        ValueError: a call is not JSON.
    """
    longest = max(len(test.expected) for test in tests.tests)
    limits = Limits(cpu_s=CPU_S, memory_mb=MEMORY_MB, output_kb=max(_LEAST_OUTPUT_KB, longest // 512))
    if tests.function:
        cases = [CodeTest(arguments_of(test), expected_value(test)) for test in tests.tests]
    else:
        encoded = [(test.given.encode(), test.expected.encode()) for test in tests.tests]
        cases = [CodeTest(given, expected) for given, expected in encoded]
    return CodeProblem(
        tests=tuple(cases),
        function=tests.function,
        limits=limits,
        tolerance=TOLERANCE,
        prelude=PRELUDE if tests.function else "",
    )
