"""Two graders: ``strict`` is right, ``compat`` has the faults of LiveCodeBench's own harness, one by one."""

import json

import pytest

from gspo.cli import main
from gspo.errors import InputError
from gspo.evals.benchmark import Answer
from gspo.evals.livecodebench import LIVECODEBENCH
from gspo.evals.livecodebench.compat import fenced_program, judge_compat, lines_agree, same_as_there
from gspo.evals.livecodebench.files import Tests, TextTest
from gspo.evals.livecodebench.grading import LiveCodeGrader, code_problem
from gspo.rewards.code import judge
from gspo.sandbox import BoxResult, Ending, open_sandbox

from .live_rows import SCALE, SUM, row, write


def code(*lines: str) -> str:
    return "\n".join(lines) + "\n"


MAIN = "if __name__ == '__main__':"
N = "n = int(input())\nprint(sum(map(int, input().split())))\n"


@pytest.fixture(scope="module")
def sandbox():
    try:
        return open_sandbox("auto", num_slots=2)
    except InputError as error:
        pytest.skip(str(error))


def as_tests(pairs, function=""):
    return Tests(tuple(TextTest(given, expected) for given, expected in pairs), 1, function)


def both(sandbox, program, pairs=SUM, function="", streams="buffered"):
    """(strict, compat) of a program."""
    tests = as_tests(pairs, function)
    strict = judge(program, code_problem(tests), sandbox).correct
    return strict, judge_compat(program, tests, sandbox, streams, timeout_s=1).passed


@pytest.mark.parametrize(
    "program",
    [
        N,
        code("def main():", "    input()", "    print(sum(map(int, input().split())))", MAIN, "    main()"),
        "import sys\nd = sys.stdin.buffer.read().split()\nprint(sum(map(int, d[1:])))\n",
        "import sys\ninput = sys.stdin.readline\nn = int(input())\nprint(sum(map(int, input().split())))\nexit()\n",
        "print(sum(map(int, (input(), input())[1].split())))",
    ],
)
def test_honest_programs_pass_both(sandbox, program):
    assert both(sandbox, program) == (True, True)


@pytest.mark.parametrize(
    "program",
    [
        "print(3)\n",
        "print(\n",
        "import sys\nsys.exit(0)\n",
        "raise SystemExit\n",
        "print(3, 5, sep='\\n')\n",
        "1 / 0\n",
    ],
)
def test_wrong_programs_fail_both(sandbox, program):
    assert both(sandbox, program) == (False, False)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (
            "import sys\nd = sys.stdin.buffer\nd.readline()\nprint(sum(map(int, d.readline().split())))\n",
            "a line again",
        ),
        ("import sys\nl = list(sys.stdin)\nprint(sum(map(int, l[1].split())))\n", "stdin cannot be iterated over"),
        ("print(sum(map(int, open(0).read().split()[1:])))\n", "the real stdin is empty"),
        (
            code(
                "t = 0",
                "def add(x):",
                "    global t",
                "    t += x",
                "input()",
                "add(eval(input().replace(' ', '+')))",
                "print(t)",
            ),
            "global",
        ),
        (
            "import sys\ninput()\ns = str(sum(map(int, input().split())))\nsys.stdout.buffer.write(s.encode())\n",
            "bytes out",
        ),
        ("import os\ninput()\nprint(sum(map(int, input().split())), flush=True)\nos._exit(0)\n", "the judge dies"),
        ("# class Solution\nclass Solution: pass\n" + N, "taken for a call"),
        ("import resource\n" + N, "a module that is hidden"),
        ("from sys import stdout\ninput()\nstdout.write(str(sum(map(int, input().split()))))\n", "unseen output"),
        ("if __name__ == '__main__':\n    " + N.replace("\n", "\n    ") + "pass\nx = 1\n", "a main that is not last"),
    ],
    ids=lambda value: value if "\n" not in value else "",
)
def test_right_programs_that_the_harness_fails(sandbox, program, why):
    """Why compat is not the grade."""
    assert both(sandbox, program) == (True, False)


def test_the_earlier_harness_has_other_streams(sandbox):
    """It can be iterated over, and has no buffer."""
    iterated = "import sys\nl = list(sys.stdin)\nprint(sum(map(int, l[1].split())))\n"
    buffered = "import sys\nd = sys.stdin.buffer.read().split()\nprint(sum(map(int, d[1:])))\n"
    assert both(sandbox, iterated, streams="plain") == (True, True)
    assert both(sandbox, buffered, streams="plain") == (True, False)


def test_reading_the_rest_gives_everything_again_in_the_harness(sandbox):
    """And before 2025 it did not."""
    program = "import sys\nn = int(input())\nprint(sum(map(int, sys.stdin.read().split())))\n"
    assert both(sandbox, program) == (True, False)
    assert both(sandbox, program, streams="plain") == (True, True)


def test_a_stdin_that_was_imported_by_name_is_another_one_in_the_harness(sandbox):
    """Imports are run before the streams are replaced. Its lines have no ends, so an empty one looks like the end of
    the input, and behind the last there is an error."""
    program = code(
        "from sys import stdin", "total = 0", "while line := stdin.readline():", "    total += len(line.split())"
    )
    program += "print(total)\n"
    by_module = program.replace("from sys import stdin", "import sys").replace("stdin.readline", "sys.stdin.readline")
    for given, there in (("1\n2\n", True), ("1\n2", False), ("1\n\n2\n", False)):
        expected = str(len(given.split()))
        assert both(sandbox, program, [(given, expected)]) == (True, there)
        assert both(sandbox, by_module, [(given, expected)]) == (True, True)


def test_state_survives_from_test_to_test_in_the_harness(sandbox):
    """One module for all tests: what the first test leaves in it, the second finds. Fresh boxes forget."""
    program = "import math\nmath.runs = getattr(math, 'runs', 0) + 1\nprint(math.runs)\n"
    assert both(sandbox, program, [("a", "1"), ("b", "2")]) == (False, True)
    assert both(sandbox, program, [("a", "1"), ("b", "1")]) == (True, False)


def test_a_timeout_can_be_caught_in_the_harness(sandbox):
    """Its alarm is an exception. What it prints is in the way here; a program that prints nothing more passes."""
    tests = as_tests([("", "x")])
    caught = code("import sys", "try:", "    while True: pass", "except Exception: pass")
    loop = caught + code("sys.stdout.truncate(sys.stdout.seek(0))", "print('x')")
    assert judge_compat(loop, tests, sandbox, timeout_s=1).passed is True
    assert judge_compat("while True: pass", tests, sandbox, timeout_s=1).verdict == "time limit"


def test_floats_need_every_digit_in_the_harness(sandbox):
    program = "print(1 / 3)\n"
    assert both(sandbox, program, [("", "0.33333333")]) == (True, False)
    assert both(sandbox, program, [("", "0.33333333"[:3])]) == (False, False)


@pytest.mark.parametrize(
    ("program", "verdicts"),
    [
        (
            code(
                "class Solution:",
                "    def scale(self, xs: List[int], k: int) -> List[int]:",
                "        return [x * k for x in xs]",
            ),
            (True, True),
        ),
        ("def scale(xs, k):\n    return tuple(x * k for x in xs)\n", (True, True)),
        ("def scale(xs, k):\n    return map(k.__mul__, xs)\n", (False, False)),
        ("class E(list):\n    def __eq__(self, other): return True\ndef scale(xs, k): return E()\n", (False, False)),
        ("class A:\n    def __eq__(self, other): return True\ndef scale(xs, k): return A()\n", (False, False)),
        ("import sys\ndef scale(xs, k): sys.exit()\n", (False, False)),
        ("def other(xs, k): return xs\n", (False, False)),
        ("from __future__ import annotations\ndef scale(xs, k): return [x * k for x in xs]\n", (True, False)),
    ],
)
def test_calls(sandbox, program, verdicts):
    assert both(sandbox, program, SCALE, "scale") == verdicts


def test_nested_tuples_and_inexact_floats_fail_calls_in_the_harness(sandbox):
    assert both(sandbox, "def f(x): return [(x, x)]\n", [("1", "[[1, 1]]")], "f") == (True, False)
    assert both(sandbox, "def f(x): return 0.1 + x\n", [("0.2", "0.3")], "f") == (True, False)
    assert both(sandbox, "def f(x): return x == 1\n", [("1", "1")], "f") == (False, True)  # True is 1 there


def test_one_object_answers_all_calls_in_the_harness(sandbox):
    program = "class Solution:\n    seen = 0\n    def f(self, x):\n        self.seen += 1\n        return self.seen\n"
    assert both(sandbox, program, [("1", "1"), ("1", "2")], "f") == (False, True)


def test_large_numbers_survive_the_way_out(sandbox):
    program = "def f(x): return [x ** 200, {'a': (1,)}, None, -x ** 63]\n"
    expected = json.dumps([10**200, {"a": [1]}, None, -(10**63)])
    assert judge_compat(program, as_tests([("10", expected)], "f"), sandbox).passed is False  # the inner tuple
    program = program.replace("(1,)", "[1]")
    assert judge_compat(program, as_tests([("10", expected)], "f"), sandbox).passed is True


def test_expected_outputs_are_not_in_the_box(sandbox):
    """A program that looks through everything the process knows finds the input, and not the answer."""
    program = code(
        "import gc, sys",
        "input()",
        "number = '817' + '23'  # the program itself is in the process too",
        "found = [one for one in gc.get_objects() if isinstance(one, (list, tuple, dict)) and number in repr(one)]",
        "frame = sys._getframe(1)",
        "while frame:",
        "    found += [value for value in frame.f_locals.values() if number in repr(value)]",
        "    frame = frame.f_back",
        "print(len(found) > 0)",
    )
    assert judge_compat(program, as_tests([("1", "False"), ("2", "81723")]), sandbox).reason.startswith("test 2")


@pytest.mark.parametrize(
    ("expected", "said", "same"),
    [
        ("1 2\n3\n", " 1 2 \n 3", True),
        ("1.50", "1.5", True),
        ("1e3", "1000", True),
        ("0.1", "0.10000001", False),
        ("a", "A", False),
        ("", "\n\n", True),
        ("1\n\n2", "1\n2", False),
        ("1  2", "1 2", True),  # as decimals
        ("a  b", "a b", False),  # as text
        ("nan", "NaN", False),
        ("50000000000000000", "50000000000000001", False),
    ],
)
def test_outputs_by_the_rule_of_the_harness(expected, said, same):
    assert lines_agree(expected, said) is same


@pytest.mark.parametrize(
    ("expected", "answer", "same"),
    [
        ("[1, 2]", [1, 2], True),
        ("1", True, True),
        ("1", 1.0, True),
        ("0.3", 0.1 + 0.2, False),
        ("[[1]]", [{"tuple": [1]}], False),
        ('{"1": 2}', {"dict": [["1", 2]]}, True),
        ('{"1": 2}', {"dict": [[1, 2]]}, False),
        ("1" + "0" * 5000, {"int": hex(10**5000)}, True),
        ("null", {"other": "A"}, False),
        ("null", {"int": 7}, False),
        ("not json", 1, False),
    ],
)
def test_values_by_the_rule_of_the_harness(expected, answer, same):
    assert same_as_there(expected, answer) is same


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("a\n```python\n1\n```\nb", "1"),
        ("```python\n1\n```\n```\n2\n```", "2"),
        ("```python\n1\n```\ntext ``` text", "text ``` text"[:0]),  # the last two lines with a fence are 3 and 4
        ("```python\n1", ""),
        ("print(1)", ""),
        ("<think>```python\n1\n```</think>", "1"),
    ],
)
def test_the_program_by_the_rule_of_the_harness(response, program):
    assert fenced_program(response) == program


class BrokenBoxes:
    """A sandbox that cannot build a box."""

    num_slots = 1

    def run_python(self, *_, **__):
        return BoxResult(Ending.FAILURE, detail="no box")


def test_a_box_that_fails_is_no_verdict(tmp_path):
    imported = LIVECODEBENCH.load([write(tmp_path / "test.jsonl", [row("a")])], {"num_problems": "1"})
    grade = LiveCodeGrader(BrokenBoxes()).grade(imported.problems, [Answer(f"```python\n{N}```")])[0]
    assert grade.value is None
    assert grade.components == {"strict": None, "compat": None}


def test_unreadable_calls_leave_strict_without_a_verdict(tmp_path, sandbox):
    rows = [row("a", tests=[("[1]\n2", "[2]"), ("\n", '""')], function="scale")]
    imported = LIVECODEBENCH.load([write(tmp_path / "test.jsonl", rows)], {"num_problems": "1"})
    program = Answer("```python\ndef scale(xs, k): return [x * k for x in xs]\n```")
    grade = LiveCodeGrader(sandbox).grade(imported.problems, [program])[0]
    assert (grade.value, grade.components["compat"]) == (None, 0.0)
    assert "test 2" in grade.reason


def test_the_whole_benchmark_on_brought_samples(tmp_path, capsys, sandbox):
    """``gspo eval`` from files to numbers: a right program, one that only compat fails, a wrong one, and no program.

    strict: sum 3/4, scale 1/4, so 0.5; compat: sum 2/4, scale 1/4, so 0.375. abc350_c has known faults: without it only
    ``scale`` is left.
    """
    data = write(tmp_path / "test.jsonl", [row("abc350_c"), row("1", tests=SCALE, function="scale", difficulty="hard")])
    right, iterated = N, "import sys\nl = list(sys.stdin)\nprint(sum(map(int, l[1].split())))\n"
    scale = "class Solution:\n    def scale(self, xs: List[int], k: int): return [x * k for x in xs]\n"
    responses = {
        "abc350_c": [right, right, iterated, "print(3)"],
        "1": [scale, "print(", "class Solution: pass", "def scale(xs, k): return xs"],
    }
    lines = [{"id": k, "responses": [f"So:\n```python\n{p}\n```" for p in v]} for k, v in responses.items()]
    samples = write(tmp_path / "samples.jsonl", lines)
    out = tmp_path / "out"
    words = ["eval", "--benchmark", "livecodebench", "--data", str(data), "--samples", str(samples), "--out", str(out)]
    words += ["--option", "num_problems=2", "--num-samples", "4"]
    assert main(words) == 0
    result = json.loads((out / "evaluation.json").read_text())
    metrics = result["metrics"]
    assert metrics["pass@1"] == metrics["strict/pass@1"] == 0.5
    assert metrics["compat/pass@1"] == 0.375
    assert metrics["strict/without_errata/pass@1"] == metrics["compat/without_errata/pass@1"] == 0.25
    assert result["data"]["window"] == ["2024-10-01", "2025-02-28"]
    tables = {table["title"]: table["rows"] for table in result["tables"]}
    assert tables["By difficulty"] == [["easy", 1, 0.75, 0.5], ["hard", 1, 0.25, 0.25]]
    assert ["pass", "fail", 1] in tables["Agreement of the graders"]
    said = capsys.readouterr()
    assert "strict/pass@1 50.0 %" in said.out
    assert "known faults" in said.err + said.out
