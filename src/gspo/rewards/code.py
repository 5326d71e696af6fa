"""The ``code`` verifier: does a program pass the tests of its problem?

The program runs in a box of ``gspo.sandbox``, a fresh one per test, and never sees an expected output: its answer comes
out as bytes and is compared here. The exit status is never a pass; a failure of the box itself is tried again and then
leaves the response unscored. See docs/verifiers.md for what each verdict means.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from gspo.errors import DataError, RewardError
from gspo.rewards.base import Unscored, completion_text, gold_answers
from gspo.rewards.extraction import visible_text
from gspo.rewards.output import read_value, same_value, text_difference
from gspo.rewards.problems import CodeProblem, CodeTest, read_problem
from gspo.rewards.verdict import Judgement
from gspo.sandbox import BoxResult, Ending, Limits, Sandbox
from gspo.sandbox.guest import CALL_SHIM

MAX_PROGRAM_CHARACTERS = 1 << 20
Credit = Literal["all", "partial"]
_CHECKER_LIMITS = Limits(cpu_s=10.0)
_FENCE = re.compile(
    r"^[ \t]*(?P<mark>`{3,}|~{3,})[ \t]*(?P<language>[\w+.#-]*)[^\n]*\n"
    r"(?P<body>.*?)(?P<close>^[ \t]*(?P=mark)[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = ("python", "python3", "py", "py3", "")


class CodeVerdict(StrEnum):
    """Of one test."""

    ACCEPTED = "accepted"
    WRONG_ANSWER = "wrong answer"
    RUNTIME_ERROR = "runtime error"
    TIME_LIMIT = "time limit"
    MEMORY_LIMIT = "memory limit"
    OUTPUT_LIMIT = "output limit"
    UNSCORED = "unscored"  # the box or the checker failed: says nothing about the program


_LIMIT_VERDICTS = {
    Ending.TIME: CodeVerdict.TIME_LIMIT,
    Ending.MEMORY: CodeVerdict.MEMORY_LIMIT,
    Ending.OUTPUT: CodeVerdict.OUTPUT_LIMIT,
    Ending.FAILURE: CodeVerdict.UNSCORED,
}


@dataclass(frozen=True)
class TestOutcome:
    """One test."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    verdict: CodeVerdict
    reason: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True)
class CodeJudgement:
    """The tests of one program, up to where judging stopped."""

    outcomes: tuple[TestOutcome, ...]
    num_tests: int

    @property
    def share(self) -> float | None:
        """Tests passed, of all; what was not run counts as failed. None if a test could not be judged."""
        if any(outcome.verdict is CodeVerdict.UNSCORED for outcome in self.outcomes):
            return None
        return sum(outcome.verdict is CodeVerdict.ACCEPTED for outcome in self.outcomes) / self.num_tests

    @property
    def correct(self) -> bool | None:
        """Whether all tests passed. One that failed decides, also where another could not be judged."""
        verdicts = {outcome.verdict for outcome in self.outcomes}
        if verdicts - {CodeVerdict.ACCEPTED, CodeVerdict.UNSCORED}:
            return False
        return None if CodeVerdict.UNSCORED in verdicts else len(self.outcomes) == self.num_tests

    @property
    def decisive(self) -> tuple[int, TestOutcome]:
        """(number, outcome) of the test that decides: the first that failed, else one not judged, else the last."""
        numbered = list(enumerate(self.outcomes, 1))
        for spared in ((CodeVerdict.ACCEPTED, CodeVerdict.UNSCORED), (CodeVerdict.ACCEPTED,)):
            for number, outcome in numbered:
                if outcome.verdict not in spared:
                    return number, outcome
        return numbered[-1]

    def summary(self) -> Judgement:
        """As other verifiers say it; the verdict of the decisive test is the rung."""
        number, outcome = self.decisive
        passed = sum(outcome.verdict is CodeVerdict.ACCEPTED for outcome in self.outcomes)
        reason = f"{passed} of {self.num_tests} tests passed"
        if outcome.verdict is not CodeVerdict.ACCEPTED:
            reason += f"; test {number}: {outcome.reason or outcome.verdict}"
        return Judgement(self.correct, str(outcome.verdict), reason)


def extract_program(response: str) -> str | None:
    """The program that a response states; None if there is none.

    Only text after a closed think block counts. The last closed block fenced as Python is the program; else the last
    closed one without a language; else a block that is still open at the end; a response without any fence is the
    program.
    """
    text = visible_text(response)
    if text is None or not text.strip():
        return None
    blocks = [match for match in _FENCE.finditer(text) if match["language"].lower() in _PYTHON]
    if not blocks:
        return None if _FENCE.search(text) else text
    ranked = sorted(blocks, key=lambda block: (bool(block["close"]), bool(block["language"])))
    return ranked[-1]["body"]


def judge(program: str, problem: CodeProblem, sandbox: Sandbox, credit: Credit = "all") -> CodeJudgement:
    """Runs a program over the tests of a problem.

    Judging stops at the first failure where all tests must pass, and in any case at a time limit, since a program that
    is too slow once would take the limit again and again.
    """
    outcomes: list[TestOutcome] = []
    for test in problem.tests:
        outcomes.append(run_test(program, problem, test, sandbox))
        verdict = outcomes[-1].verdict
        failed = verdict not in (CodeVerdict.ACCEPTED, CodeVerdict.UNSCORED)
        if verdict is CodeVerdict.TIME_LIMIT or (failed and credit == "all"):
            break
    return CodeJudgement(tuple(outcomes), len(problem.tests))


def run_test(program: str, problem: CodeProblem, test: CodeTest, sandbox: Sandbox) -> TestOutcome:
    """Runs and judges one test."""
    if len(program) > MAX_PROGRAM_CHARACTERS:
        return TestOutcome(CodeVerdict.RUNTIME_ERROR, f"the program has {len(program)} characters")
    tag = secrets.token_hex(16)
    if problem.function:
        files: dict[str, str | bytes] = {"main.py": program, "call.py": CALL_SHIM.read_text()}
        request = {
            "tag": tag,
            "function": problem.function,
            "arguments": test.given,
            "prelude": problem.prelude,
        }
        result = sandbox.run_python(files, "call.py", stdin=json.dumps(request).encode(), limits=problem.limits)
    else:
        result = sandbox.run_python({"main.py": program}, stdin=test.given, limits=problem.limits)
    verdict, reason = _ending(result)
    if verdict is None:
        verdict, reason = _compare(result, problem, test, tag, sandbox)
    return TestOutcome(verdict, reason, result.cpu_s, result.wall_s)


def _ending(result: BoxResult) -> tuple[CodeVerdict | None, str]:
    """The verdict of a run that did not end well; None if its output is to be compared."""
    if result.ending is not Ending.EXIT:
        return _LIMIT_VERDICTS[result.ending], result.detail
    if result.exit_status == 0:
        return None, ""
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    last = lines[-1][:200] if lines else f"exit status {result.exit_status}"
    if last.partition(":")[0].strip() == "MemoryError":
        return CodeVerdict.MEMORY_LIMIT, last
    return CodeVerdict.RUNTIME_ERROR, last


def _compare(
    result: BoxResult, problem: CodeProblem, test: CodeTest, tag: str, sandbox: Sandbox
) -> tuple[CodeVerdict, str]:
    if not problem.function:
        if problem.checker is not None:
            return check(problem.checker, test.given, result.stdout, test.expected, sandbox)
        difference = text_difference(test.expected, result.stdout, problem.comparison, problem.tolerance)
        return (CodeVerdict.WRONG_ANSWER, difference) if difference else (CodeVerdict.ACCEPTED, "")
    mark = f"\n{tag} ".encode()
    _, found, rest = (b"\n" + result.stdout).rpartition(mark)
    if not found:
        return CodeVerdict.RUNTIME_ERROR, "the program ended without returning a value"
    line = rest.partition(b"\n")[0]
    try:
        value = read_value(line)
    except ValueError as error:
        return CodeVerdict.WRONG_ANSWER, f"bad output: {error}"
    if problem.checker is not None:
        given, expected = (json.dumps(part).encode() for part in (test.given, test.expected))
        return check(problem.checker, given, line, expected, sandbox)
    if same_value(test.expected, value, problem.tolerance):
        return CodeVerdict.ACCEPTED, ""
    return CodeVerdict.WRONG_ANSWER, f"{str(value)[:60]} instead of {str(test.expected)[:60]}"


def check(
    checker: str | bytes, given: bytes, said: bytes, expected: bytes, sandbox: Sandbox
) -> tuple[CodeVerdict, str]:
    """The verdict of a problem's own checker, run as ``checker input output answer`` in a box of its own.

    Exit codes are testlib's: 0 accepted; 1, 2, 4, 8 (and 7, points, of which there is no part here) not; anything else
    is a failure of the checker. A checker that fails on this output, but accepts the expected one, was brought down by
    the output: wrong answer. Else the test is unscored.
    """
    code, comment = _run_checker(checker, given, said, expected, sandbox)
    if code == 0:
        return CodeVerdict.ACCEPTED, comment
    if code in (1, 2, 4, 7, 8):
        return CodeVerdict.WRONG_ANSWER, comment or f"the checker ended with {code}"
    if _run_checker(checker, given, expected, expected, sandbox)[0] == 0:
        return CodeVerdict.WRONG_ANSWER, f"the checker cannot read this output ({comment})"
    return CodeVerdict.UNSCORED, f"the checker failed: {comment}"


def _run_checker(
    checker: str | bytes, given: bytes, said: bytes, expected: bytes, sandbox: Sandbox
) -> tuple[int | None, str]:
    """(exit status, comment); None where the checker did not end by itself."""
    data: dict[str, str | bytes] = {"input.txt": given, "output.txt": said, "answer.txt": expected}
    arguments = [f"{{box}}/{name}" for name in data]
    if isinstance(checker, str):
        result = sandbox.run_python({**data, "main.py": checker}, arguments=arguments, limits=_CHECKER_LIMITS)
    else:
        result = sandbox.run(["{box}/checker", *arguments], {**data, "checker": checker}, limits=_CHECKER_LIMITS)
    lines = (result.stderr or result.stdout).decode(errors="replace").strip().splitlines()
    return result.exit_status, (lines[-1][:200] if lines else result.detail)


class CodeReward:
    """The verifier as a reward function; it owns its sandbox.

    Args:
        credit: "all": 1 if every test passes, else 0; "partial": the share of tests passed.
        answer_column: column with the tests (see ``problems``).
        solution_column: column with a program known to be right, if the data have one; the audit runs it.
        defaults: limits, tolerance and comparison of problems that name none.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        credit: Credit = "all",
        answer_column: str = "answer",
        solution_column: str = "solution",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.sandbox = sandbox
        self.credit = credit
        self.answer_column = answer_column
        self.audit_column = solution_column
        self.defaults = dict(defaults or {})
        self._counters = {"programs": 0, **{_counter(verdict): 0 for verdict in CodeVerdict}}
        self._lock = threading.Lock()

    def __call__(self, completions: Sequence[Any], **columns: Sequence[Any]) -> list[float | Unscored]:
        problems = [self._problem(row, gold) for row, gold in enumerate(gold_answers(columns, self.answer_column))]
        programs = [extract_program(completion_text(completion)) for completion in completions]
        with ThreadPoolExecutor(self.sandbox.num_slots, thread_name_prefix="gspo-code") as threads:
            return list(threads.map(self._score, programs, problems))

    def _problem(self, row: int, gold: Any) -> CodeProblem:
        try:
            return read_problem(gold, self.defaults)
        except DataError as error:
            raise RewardError(f"row {row}, column {self.answer_column!r}: {error}") from error

    def _score(self, program: str | None, problem: CodeProblem) -> float | Unscored:
        if program is None:
            return 0.0
        judgement = judge(program, problem, self.sandbox, self.credit)
        with self._lock:
            self._counters["programs"] += 1
            self._counters[_counter(judgement.decisive[1].verdict)] += 1
        value = judgement.share if self.credit == "partial" else judgement.correct
        return Unscored(judgement.decisive[1].reason or "a test could not be judged") if value is None else float(value)

    @property
    def counters(self) -> dict[str, int]:
        """Programs judged, by the verdict of their decisive test."""
        with self._lock:
            return dict(self._counters)

    def close(self) -> None:
        """Nothing to end: no box outlives its run."""


def _counter(verdict: CodeVerdict) -> str:
    return f"programs/{str(verdict).replace(' ', '_')}"


def verify(gold: str, response: str, sandbox: Sandbox) -> Judgement:
    """Judges a whole response against the tests of a problem, for ``gspo grade``.

    Raises:
        DataError: the tests cannot be read.
    """
    problem = read_problem(gold)
    program = extract_program(response)
    if program is None:
        return Judgement(False, "extraction", "the response holds no program")
    return judge(program, problem, sandbox).summary()
