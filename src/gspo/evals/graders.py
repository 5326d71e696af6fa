"""Graders: integers, the verifiers of ``rewards`` in killable processes, programs in boxes, and reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from gspo.errors import DataError
from gspo.evals.benchmark import Answer, Grade, Problem
from gspo.rewards.answers import Equation, Leaf, read
from gspo.rewards.base import RewardSet
from gspo.rewards.builtin import VERIFIERS, VerifierReward
from gspo.rewards.code import extract_program, judge
from gspo.rewards.expressions import Expr, UnreadableError
from gspo.rewards.extraction import final_answer
from gspo.rewards.policies import MathPolicy
from gspo.rewards.pool import VerifierPool
from gspo.rewards.problems import read_problem
from gspo.rewards.verdict import Judgement
from gspo.sandbox import Sandbox
from gspo.types import Prompt

#: A longer answer is not an integer that anyone would write.
MAX_INTEGER_CHARACTERS = 64


class IntegerGrader:
    """The integer rung alone: the stated answer is one integer, written as a number, and it is the gold one.

    Args:
        low, high: smallest and largest integer that can be an answer; None: no bound.
    """

    def __init__(self, low: int | None = None, high: int | None = None) -> None:
        self.low = low
        self.high = high

    @property
    def policy(self) -> Mapping[str, Any]:
        return {"verifier": "integer", "low": self.low, "high": self.high, "extraction": "gspo.rewards.extraction"}

    def grade(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[Grade]:
        return [self._grade(int(p.gold), answer.text) for p, answer in zip(problems, answers, strict=True)]

    def _grade(self, gold: int, response: str) -> Grade:
        stated = final_answer(response)
        if not stated:
            return Grade(0.0, "no answer", "the response states no answer", answered=False)
        value = integer_of(stated)
        if value is None:
            return Grade(0.0, "not an integer", f"{stated[:60]!r} is not an integer")
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            return Grade(0.0, "out of range", f"{stated[:60]!r} is not from {self.low} to {self.high}")
        return Grade(float(value == gold), "right" if value == gold else "wrong", f"{value} against {gold}")

    def close(self) -> None:
        """Nothing to end."""


def integer_of(text: str) -> int | None:
    """The integer that an answer is, written as one number; None if it is none.

    Leading zeros, a unit, and ``m + n =`` before it are allowed; what would still have to be computed is not.

    >>> integer_of("033"), integer_of("m + n = 33"), integer_of("33.5"), integer_of("66/2")
    (33, 33, None, None)
    """
    if len(text) > MAX_INTEGER_CHARACTERS:
        return None
    try:
        answer = read(text)
    except UnreadableError:
        return None
    if isinstance(answer, Equation):  # m + n = 33
        expr: Expr | None = answer.right
    else:
        expr = answer.expr if isinstance(answer, Leaf) and answer.base is None else None
    sign = 1
    while expr is not None and expr.op == "neg":
        sign, expr = -sign, expr.args[0]
    if expr is None or expr.op != "num" or expr.value is None or expr.value.denominator != 1:
        return None
    return sign * int(expr.value)


class VerifierGrader(VerifierReward):
    """A verifier of ``rewards`` (math, number, exact_match) in killable processes; the rung is the verdict."""

    def __init__(self, name: str, *, timeout_s: float = 5.0, num_workers: int = 2) -> None:
        module = VERIFIERS[name]
        options = {"policy": asdict(MathPolicy())} if name == "math" else {}
        super().__init__(module, VerifierPool(num_workers, timeout_s, preload=[module]), options=options)
        self.policy: Mapping[str, Any] = {"verifier": name, "timeout_s": timeout_s, **options}

    def grade(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[Grade]:
        golds = [str(problem.gold) for problem in problems]
        items = list(zip(golds, [answer.text for answer in answers], strict=True))
        verdicts = self.pool.run(f"{self.module}:verify", items, self.options)
        grades = []
        for gold, verdict in zip(golds, verdicts, strict=True):
            value = self._value(gold, verdict)
            rung = verdict.rung or ("limit" if verdict.ran_into_limit else "crash")
            reason = verdict.reason or verdict.failure or ""
            known = value if isinstance(value, float) else None
            grades.append(Grade(known, _verdict(known, rung), reason, answered=rung != "extraction"))
        return grades

    def unreadable(self, gold: str) -> str:
        """Why a gold answer cannot be read; empty if it can."""
        found = self.pool.run(f"{self.module}:read_gold", [(gold,)])[0]
        return "" if found.value else found.reason or found.failure or "it cannot be read"

    def close(self) -> None:
        self.pool.close()


class CodeGrader:
    """Programs in boxes: 1 where all tests pass; the verdict is that of the decisive test."""

    def __init__(self, sandbox: Sandbox, defaults: Mapping[str, Any] | None = None) -> None:
        self.sandbox = sandbox
        self.defaults = dict(defaults or {})

    @property
    def policy(self) -> Mapping[str, Any]:
        return {"verifier": "code", "credit": "all", "defaults": self.defaults}

    def grade(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[Grade]:
        with ThreadPoolExecutor(self.sandbox.num_slots, thread_name_prefix="gspo-eval") as threads:
            return list(threads.map(self._grade, problems, answers))

    def _grade(self, problem: Problem, answer: Answer) -> Grade:
        try:
            task = read_problem(problem.gold, self.defaults)
        except DataError as error:
            raise DataError(f"{problem.place}: {error}") from error
        program = extract_program(answer.text)
        if program is None:
            return Grade(0.0, "no program", "the response holds no program", answered=False)
        return grade_of(judge(program, task, self.sandbox).summary())

    def close(self) -> None:
        """No box outlives its run."""


def grade_of(judgement: Judgement) -> Grade:
    """A judgement as a grade."""
    value = None if judgement.correct is None else float(judgement.correct)
    return Grade(value, judgement.rung, judgement.reason, answered=judgement.rung != "extraction")


class RewardGrader:
    """A reward set as a grader: its value is the grade, its terms are the components where there are several."""

    def __init__(self, reward_set: RewardSet, policy: Mapping[str, Any]) -> None:
        self.reward_set = reward_set
        self.policy = policy

    def grade(self, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[Grade]:
        prompts = [Prompt(p.id, p.prompt, (), columns={**p.columns, "answer": p.gold}) for p in problems]
        scores = self.reward_set.score(prompts, [answer.text for answer in answers], [() for _ in answers])
        several = len(self.reward_set.functions) > 1
        return [
            Grade(
                score.value,
                _verdict(score.value, ""),
                score.failure or "",
                answered=bool(answer.text.strip()),
                components=score.components if several else {},
            )
            for score, answer in zip(scores, answers, strict=True)
        ]

    def close(self) -> None:
        self.reward_set.close()


def _verdict(value: float | None, rung: str) -> str:
    word = "not judged" if value is None else "right" if value >= 1 else "wrong"
    return f"{word} ({rung})" if rung else word
