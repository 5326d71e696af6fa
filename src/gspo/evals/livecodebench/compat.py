"""The grader ``compat``: the verdicts of LiveCodeBench's own harness, its faults included, without its dangers.

For comparison with published numbers. The program runs as that harness runs it (``sandbox/guest/harness.py`` says how),
but in a box; what it said comes out and is compared here, by that harness's rule. Expected outputs never enter the box,
so an object that claims to equal everything does not pass here, as it does there. See docs/livecodebench.md.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from gspo.evals.livecodebench.files import Tests
from gspo.sandbox import BoxResult, Ending, Limits, Sandbox
from gspo.sandbox.guest import HARNESS

#: Seconds on the clock for each test.
TIMEOUT_S = 6
#: "buffered": the harness since 2025, whose standard input has ``buffer``, but cannot be iterated over. "plain": before
#: that; it can be iterated over and has no ``buffer``.
Streams = Literal["buffered", "plain"]
STREAMS: tuple[Streams, ...] = ("buffered", "plain")
_LONG = 4000  # digits; Python itself converts no more than 4300


@dataclass(frozen=True)
class CompatVerdict:
    """Whether all tests passed; None if the box failed."""

    passed: bool | None
    verdict: str
    reason: str = ""


def fenced_program(response: str) -> str:
    """The program by that harness's rule: the lines between the last two lines that hold three backticks.

    The whole response counts, thinking included; with fewer than two such lines the program is empty.

    >>> fenced_program("a\\n```python\\nprint(1)\\n```\\nb")
    'print(1)'
    """
    lines = response.split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else ""


def judge_compat(
    program: str, tests: Tests, sandbox: Sandbox, streams: Streams = "buffered", timeout_s: int = TIMEOUT_S
) -> CompatVerdict:
    """Runs a program over all tests in one process of a box, and compares what it said."""
    if not program.strip():
        return CompatVerdict(False, "no program", "an empty program")
    tag = secrets.token_hex(16)
    request = {
        "tag": tag,
        "program": program,
        "function": tests.function,
        "inputs": [test.given for test in tests.tests],
        "timeout_s": timeout_s,
        "streams": streams,
    }
    seconds = (timeout_s + 1.0) * len(tests.tests) + 5
    result = sandbox.run_python(
        {"main.py": HARNESS.read_text()},
        stdin=json.dumps(request).encode(),
        limits=Limits(cpu_s=seconds, wall_s=seconds, memory_mb=4096, output_kb=256 * 1024),
    )
    if result.ending is Ending.FAILURE:
        return CompatVerdict(None, "unscored", result.detail)
    report = _report(result, tag)
    if isinstance(report, str):
        return CompatVerdict(False, "time limit" if result.ending is Ending.TIME else "runtime error", report)
    return _compare(report["said"], report["error"], tests)


def _report(result: BoxResult, tag: str) -> dict[str, Any] | str:
    """What the harness reported; in words why there is nothing."""
    _, found, rest = result.stdout.rpartition(f"\n{tag} ".encode())
    if not found:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        return result.detail or (lines[-1][:200] if lines else "the process ended before its report")
    try:
        report = json.loads(rest.partition(b"\n")[0])
    except (ValueError, RecursionError) as error:
        return f"the report cannot be read ({error})"
    known = isinstance(report, dict) and isinstance(report.get("said"), list) and isinstance(report.get("error"), str)
    return report if known else "the report is not one of the harness"


def _compare(said: Sequence[Any], error: str, tests: Tests) -> CompatVerdict:
    """The first test that fails decides."""
    for number, (test, answer) in enumerate(zip(tests.tests, said, strict=False), 1):
        same = same_as_there(test.expected, answer) if tests.function else lines_agree(test.expected, str(answer))
        if not same:
            return CompatVerdict(False, "wrong answer", f"test {number}: {str(answer)[:60]!r}")
    if error or len(said) < len(tests.tests):
        verdict = "time limit" if error.startswith("TimeoutException") else "runtime error"
        return CompatVerdict(False, verdict, f"test {len(said) + 1}: {error or 'no answer'}")
    return CompatVerdict(True, "accepted")


def lines_agree(expected: str, said: str) -> bool:
    """Two outputs by that harness's rule: as many lines after stripping, and each the same text or the same decimals.

    >>> lines_agree("1.50 2\\n", "  1.5 2.0"), lines_agree("0.3333333", "0.33333333"), lines_agree("Yes", "yes")
    (True, False, False)
    """
    wanted, found = ([line.strip() for line in text.strip().split("\n")] for text in (expected, said))
    return len(wanted) == len(found) and all(map(_line_agrees, wanted, found))


def _line_agrees(expected: str, said: str) -> bool:
    if expected == said:
        return True
    try:
        return [Decimal(word) for word in said.split()] == [Decimal(word) for word in expected.split()]
    except InvalidOperation:
        return False


def same_as_there(expected: str, answer: Any) -> bool:
    """Whether a call's value, as the harness reported it, equals the expected JSON by Python's ``==``.

    Floats must be exactly equal, ``True`` is 1, a tuple is a list on the outside only.
    """
    try:
        wanted = json.loads(expected, parse_int=_whole)
        return bool(_value(answer) == wanted)
    except (ValueError, RecursionError, TypeError, KeyError):
        return False


def _whole(text: str) -> int:
    return int(text) if len(text) <= _LONG else int(Decimal(text))


class _Foreign:
    """Equal to nothing that JSON can say."""


def _value(answer: Any) -> Any:
    """The value out of its tags."""
    if isinstance(answer, list):
        return [_value(part) for part in answer]
    if not isinstance(answer, dict):
        return answer
    (tag, content), *_ = answer.items()
    if tag == "int":
        return int(content, 16)
    if tag == "tuple":
        return tuple(_value(part) for part in content)
    if tag == "dict":
        return {_value(key): _value(part) for key, part in content}
    return _Foreign()
