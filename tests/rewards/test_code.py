import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import InputError, RewardError
from gspo.rewards.audit import audit
from gspo.rewards.builtin import build_rewards
from gspo.rewards.code import CodeReward, CodeVerdict, check, extract_program, judge, verify
from gspo.rewards.problems import read_problem
from gspo.sandbox import BoxResult, Ending, open_sandbox
from gspo.types import Prompt

G13 = json.loads((Path(__file__).parents[1] / "cases" / "code_cases.json").read_text())[0]["input"]
SUM = {"tests": [["2\n1 2\n", "3"], ["1\n-5\n", "-5"], ["1\n7\n", "7"]], "cpu_s": 2, "wall_s": 20}
RIGHT = "n = int(input())\nprint(sum(map(int, input().split())))\n"


@pytest.fixture(scope="module")
def sandbox():
    try:
        return open_sandbox("auto", num_slots=2)
    except InputError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", G13["programs"], ids=lambda case: case["id"])
def test_case_g13(case, sandbox):
    """4 s and 1 GiB per test are the defaults; the endless loop of g5 gets less, so that the test is fast."""
    problem = {name: value for name, value in G13["problems"][case["problem"]].items() if name != "text"}
    limits = {"cpu_s": 0.4} if case["id"] == "g5" else {}
    program = extract_program(case["program"])
    assert judge(program, read_problem({**problem, **limits}), sandbox).correct is case["verdict"]


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "import sys; sys.exit()"])
def test_a_program_may_end_itself(sandbox, end):
    assert judge(f"{RIGHT}{end}\n", read_problem(SUM), sandbox).correct is True


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("So:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```py\nprint(1)\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nbetter:\n```python\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),  # a block without a language is less
        ("```python\nprint(1)\n```\nor\n```python\nprint(", "print(1)\n"),  # an open block is less still
        ("```python\nprint('''\n  ``` ''')", "print('''\n  ``` ''')"),
        ("~~~~python\nprint(1)\n~~~~", "print(1)\n"),
        ("<think>```python\nprint(0)\n```</think>```python\nprint(1)\n```", "print(1)\n"),
        ("```cpp\nint main() {}\n```", None),
        ("<think>```python\nprint(1)\n```", None),
        ("", None),
        (" \n", None),
    ],
)
def test_the_program_of_a_response(response, program):
    assert extract_program(response) == program


def test_judging_stops_where_it_is_decided(sandbox):
    problem = read_problem(SUM)
    first_only = "input()\nprint(3)"
    assert len(judge(first_only, problem, sandbox).outcomes) == 2
    partial = judge(first_only, problem, sandbox, "partial")
    assert len(partial.outcomes) == 3
    assert (partial.share, partial.correct) == (1 / 3, False)
    slow = judge("while True: pass", read_problem({**SUM, "cpu_s": 0.2}), sandbox, "partial")
    assert (len(slow.outcomes), slow.share) == (1, 0.0)


CHECKER = """
import sys
given, said, answer = (open(path).read() for path in sys.argv[1:4])
try:
    a, b = map(int, said.split())
except ValueError:
    print("two numbers are needed", file=sys.stderr)
    sys.exit(2)
sys.exit(0 if a * b == int(given) and a > 1 else 1)
"""


def test_a_checker_decides_with_testlib_codes(sandbox):
    problem = read_problem({"tests": [["15", "3 5"]], "checker": CHECKER, "cpu_s": 2, "wall_s": 20})
    for program, verdict in (
        ("print(5, 3)", CodeVerdict.ACCEPTED),
        ("print(1, 15)", CodeVerdict.WRONG_ANSWER),
        ("print('x')", CodeVerdict.WRONG_ANSWER),
        ("print(5, 3); raise SystemExit(3)", CodeVerdict.RUNTIME_ERROR),
    ):
        assert judge(program, problem, sandbox).outcomes[0].verdict is verdict


def test_a_checker_sees_values_of_calls_as_json(sandbox):
    checker = "import json, sys\na, b = (json.load(open(p)) for p in sys.argv[2:4])\nsys.exit(sorted(a) != sorted(b))"
    problem = read_problem({"function": "f", "tests": [[[1], [1, 2]]], "checker": checker, "cpu_s": 2, "wall_s": 20})
    assert judge("def f(x): return [2, 1]", problem, sandbox).correct is True
    assert judge("def f(x): return [2, 2]", problem, sandbox).correct is False


def test_a_checker_that_fails_judges_nothing_unless_the_output_brought_it_down(sandbox):
    always = "import sys; sys.exit(3)"
    assert check(always, b"", b"1", b"1", sandbox)[0] is CodeVerdict.UNSCORED
    fragile = "import sys; int(open(sys.argv[2]).read())"
    assert check(fragile, b"", b"x", b"1", sandbox)[0] is CodeVerdict.WRONG_ANSWER
    assert check("raise SystemExit(7)", b"", b"x", b"1", sandbox)[0] is CodeVerdict.WRONG_ANSWER


def test_an_executable_can_be_a_checker(sandbox):
    script = f"#!{sandbox.backend.interpreter.executable}\nimport sys\nsys.exit(open(sys.argv[2]).read() != '1')"
    assert check(script.encode(), b"", b"1", b"1", sandbox)[0] is CodeVerdict.ACCEPTED
    assert check(script.encode(), b"", b"2", b"1", sandbox)[0] is CodeVerdict.WRONG_ANSWER


class Answers:
    """A sandbox that answers as told, for what cannot be provoked."""

    num_slots = 1

    def __init__(self, *results):
        self.results = list(results)

    def run_python(self, files, *arguments, **options):
        return self.results.pop(0)


RIGHT_RUN = BoxResult(Ending.EXIT, 0, b"3")
WRONG_RUN = BoxResult(Ending.EXIT, 0, b"4")
FAILED_RUN = BoxResult(Ending.FAILURE, detail="no box")


def test_a_failure_of_the_box_is_unscored_and_a_failed_test_still_decides():
    problem = read_problem({"tests": [["", "3"], ["", "3"]]})
    unscored = judge("p", problem, Answers(RIGHT_RUN, FAILED_RUN))
    assert (unscored.correct, unscored.share) == (None, None)
    assert unscored.summary().reason == "1 of 2 tests passed; test 2: no box"
    assert judge("p", problem, Answers(FAILED_RUN, WRONG_RUN)).correct is False
    [score] = CodeReward(Answers(FAILED_RUN, RIGHT_RUN))(["p"], answer=[{"tests": [["", "3"], ["", "3"]]}])
    assert score.reason == "no box"


def test_memory_errors_are_told_from_other_errors():
    problem = read_problem({"tests": [["", "3"]]})
    for last, verdict in ((b"MemoryError", "memory limit"), (b"ValueError: MemoryError", "runtime error")):
        run = BoxResult(Ending.EXIT, 1, b"3", b"Traceback\n" + last + b"\n")
        assert judge("p", problem, Answers(run)).summary().rung == verdict


def test_a_huge_program_is_not_run():
    assert judge("#" * 2_000_000, read_problem({"tests": [["", "3"]]}), Answers()).correct is False


def test_the_reward_and_its_counters(sandbox):
    reward = CodeReward(sandbox, "partial")
    texts = [f"```python\n{RIGHT}```", "input()\nprint(3)", "", [{"role": "assistant", "content": RIGHT}]]
    assert reward(texts, answer=[SUM, json.dumps(SUM), SUM, SUM]) == [1.0, 1 / 3, 0.0, 1.0]
    assert reward.counters["programs"] == 3
    assert reward.counters["programs/accepted"] == 2
    assert reward.counters["programs/wrong_answer"] == 1
    assert CodeReward(sandbox)(texts[:2], answer=[SUM, SUM]) == [1.0, 0.0]


def test_the_reward_from_several_threads(sandbox):
    reward, values = CodeReward(sandbox), []
    threads = [
        threading.Thread(target=lambda: values.extend(reward([RIGHT, "x"], answer=[SUM, SUM]))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(values) == [0.0] * 3 + [1.0] * 3


def test_tests_that_cannot_be_read_stop_the_run(sandbox):
    with pytest.raises(RewardError, match="row 1, column 'answer': the problem has no tests"):
        CodeReward(sandbox)(["p", "p"], answer=[SUM, {"tests": []}])


def test_verify_as_grade_uses_it(sandbox):
    assert verify(json.dumps(SUM), RIGHT, sandbox).rung == "accepted"
    wrong = verify(json.dumps(SUM), "input()\nprint(3)", sandbox)
    assert (wrong.correct, wrong.rung) == (False, "wrong answer")
    assert wrong.reason == "1 of 3 tests passed; test 2: line 1: '3' instead of '-5'"
    assert verify(json.dumps(SUM), "<think>", sandbox).rung == "extraction"


@dataclass
class Settings:
    name: str = "code"
    weight: float = 1.0
    kind: str = "trl"
    options: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"credits": "all"}, "has no option 'credits'; did you mean 'credit'"),
        ({"credit": "half"}, 'credit .* is \'half\'; it must be "all" or "partial"'),
        ({"num_boxes": 0}, "num_boxes .* is 0"),
        ({"cpu_s": "4"}, "cpu_s is '4'"),
        ({"comparison": "words"}, "no comparison 'words'"),
        ({"isolation": "docker"}, "no isolation 'docker'"),
    ],
)
def test_options_are_checked_at_the_start(options, message):
    with pytest.raises(InputError, match=message):
        build_rewards([Settings(options=options)])


def prompts(solution):
    columns = {"answer": json.dumps(SUM), "solution": solution}
    return [Prompt(f"p{i}", "Add.", (1,), columns={k: v for k, v in columns.items() if v}) for i in range(2)]


def test_the_audit_runs_the_known_solution(sandbox):
    with build_rewards([Settings(options={"isolation": sandbox.isolation, "credit": "partial"})]) as rewards:
        good = audit(prompts(RIGHT), rewards)
        assert good.ok
        assert good.notes == ()
        bad = audit(prompts("print(0)"), rewards)
        assert "'code' gives the gold answer less than 1 for 2 of 2 prompts" in bad.findings[0]
        without = audit(prompts(None), rewards)
        assert without.ok
        assert "2 of 2 prompts have no gold answer in column 'solution'" in without.notes[0]
