"""24 programming problems with tests made by seed; the solutions are in ``programs.txt``.

The key of a test is the reference's answer. The tests of this package show that the reference is right, on many small
inputs, by a slow and obvious solution; and that the tests are sharp, by wrong programs that each fail at least one.
"""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gspo.seeding import derive_seed

NUM_TESTS = 12
NUM_SMALL = 6  # of these are small enough for the slow solution
SOURCE = Path(__file__).with_name("programs.txt")


@dataclass(frozen=True)
class ProgramProblem:
    """One problem as ``programs.txt`` has it."""

    name: str
    function: str  # empty: reads standard input
    date: str
    statement: str
    reference: str
    brute: str
    generator: str
    checker: str | None
    wrong: Mapping[str, str]

    @property
    def prompt(self) -> str:
        """What a model is asked."""
        task = "Write a Python function." if self.function else "Write a Python program that reads standard input."
        return f"{task} {self.statement}\n\nAnswer with one fenced Python code block."


def load_problems(path: Path = SOURCE) -> list[ProgramProblem]:
    """All problems of the file, in order."""
    return [_problem(section) for section in path.read_text(encoding="utf-8").split("\n=== ")[1:]]


def _problem(section: str) -> ProgramProblem:
    head, *parts = section.split("\n--- ")
    name, kind, date = (word.strip() for word in head.split("|"))
    texts = {title.strip(): body.strip("\n") + "\n" for title, _, body in (part.partition("\n") for part in parts)}
    return ProgramProblem(
        name=name,
        function="" if kind == "stdio" else kind,
        date=date,
        statement=" ".join(texts["statement"].split()),
        reference=texts["reference"],
        brute=texts["brute"],
        generator=texts["generator"],
        checker=texts.get("checker"),
        wrong={title.removeprefix("wrong "): body for title, body in texts.items() if title.startswith("wrong ")},
    )


def make(seed: int) -> list[dict[str, Any]]:
    """Rows with ``id``, ``date``, ``prompt``, ``answer`` (tests for the reward ``code``) and ``solution``."""
    return [_row(problem, seed) for problem in load_problems()]


def _row(problem: ProgramProblem, seed: int) -> dict[str, Any]:
    rng = random.Random(derive_seed(seed, "programs", problem.name))
    inputs: dict[str, Any] = {}
    while len(inputs) < NUM_TESTS:
        given = make_input(problem, rng, max(0, len(inputs) - NUM_SMALL + 1) % 3)
        inputs.setdefault(json.dumps(given), given)
    tests = [[given, run_trusted(problem.reference, problem.function, given)] for given in inputs.values()]
    answer: dict[str, Any] = {"tests": tests}
    if problem.function:
        answer["function"] = problem.function
    if problem.checker:
        answer["checker"] = problem.checker
    return {
        "id": f"programs/{problem.name}",
        "date": problem.date,
        "prompt": problem.prompt,
        "answer": json.dumps(answer, separators=(",", ":")),
        "solution": problem.reference,
    }


def make_input(problem: ProgramProblem, rng: random.Random, size: int) -> Any:
    """One input; size 0 is small enough for the slow solution."""
    scope: dict[str, Any] = {}
    exec(problem.generator, scope)  # our own file
    return scope["make"](rng, size)


def run_trusted(source: str, function: str, given: Any) -> Any:
    """What a program of ``programs.txt`` answers: the text that it prints, or the value of its function.

    For our own programs only: nothing is boxed here.
    """
    scope: dict[str, Any] = {"__name__": "__main__"}
    if function:
        exec(source, scope)
        return json.loads(json.dumps(scope[function](*json.loads(json.dumps(given)))))
    said = io.StringIO()
    with redirect_stdout(said), patch.object(sys, "stdin", io.StringIO(given)):
        exec(source, scope)
    return said.getvalue()
