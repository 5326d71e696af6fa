"""Math answers, verifiers that hang and programs as cases: right, wrong with the fault named, and other rows."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gspo.cli.conformance import Implementation, read_cases
from gspo.rewards.math import verify

from .test_conformance import run, verdict, write

OURS = Implementation()
FOLDER = Path(__file__).parents[1] / "cases"
Pairs = Sequence[tuple[str, str]]


def case_named(file: str, name: str) -> dict[str, Any]:
    return next(case for case in json.loads((FOLDER / file).read_text()) if case["id"] == name)


def judged_by(answer: Callable[[str, str], bool | None]) -> Implementation:
    """An implementation whose math verifier is one function, called here and now."""

    @contextmanager
    def judge(limit: float, workers: int) -> Iterator[Any]:
        yield lambda pairs: [answer(gold, response) for gold, response in pairs]

    return replace(OURS, math_judge=judge)


def in_process(gold: str, response: str) -> bool | None:
    return verify(gold, response).correct


# Tables of answers (G11, triples).


@pytest.mark.parametrize(
    ("case", "right", "wrong"),
    [
        ({"input": [{"gold": "12", "response": "\\boxed{12.0}", "verdict": True}]}, True, False),
        ({"input": [{"gold": "12", "response": "\\boxed{13}", "verdict": False}]}, False, True),
        ({"input": [{"gold": "???", "response": "\\boxed{13}", "verdict": None}]}, None, False),
        ({"input": {"triples": [{"gold": "12", "prediction": "\\frac{24}{2}", "right": True}]}}, True, False),
        ({"input": {"triples": [{"gold": "12", "prediction": "so \\boxed{12}", "right": True}]}}, True, False),
    ],
)
def test_tables_of_answers(case: dict[str, Any], right: Any, wrong: Any, tmp_path: Path) -> None:
    tested = judged_by(in_process)
    rows = case["input"] if isinstance(case["input"], list) else case["input"]["triples"]
    column = "verdict" if "verdict" in rows[0] else "right"
    for value, word in ((right, "right"), (wrong, "wrong")):
        rows[0][column] = value
        assert verdict({"id": "a", **case}, tmp_path, tested) == word


def test_the_expectation_names_the_column(tmp_path: Path) -> None:
    row = {"gold": "5", "response": "\\boxed{5}", "verdict": False, "truth": True}
    case = {"id": "a", "input": [row], "expected": "column 'truth'; the moon is full"}
    assert verdict(case, tmp_path, judged_by(in_process)) == "right"
    assert verdict({**case, "expected": "column 'verdict'"}, tmp_path, judged_by(in_process)) == "wrong"
    status, text = run(write(tmp_path / "c.json", {**case, "expected": "column 'nowhere'"}))
    assert (status, "not understood" in text) == (1, True)
    assert "not checked: moon is full" in run(write(tmp_path / "c.json", case), implementation=judged_by(in_process))[1]


def test_the_answers_of_a_known_fault_are_named(tmp_path: Path) -> None:
    """A verifier that gives what the column of the other one says."""
    case = case_named("math_cases.json", "G11")
    column = {(row["gold"], row["response"]): row["math_verify_0_9_0"] for row in case["input"]}
    differ = [row for row in case["input"] if row["math_verify_0_9_0"] is not row["verdict"]]
    tested = judged_by(lambda gold, response: column[gold, response])
    status, text = run(write(tmp_path / "c.json", case), implementation=tested)
    assert status == 1
    named = [line for line in text.splitlines() if "this is the answer of the fault 'math_verify_0_9_0'" in line]
    assert len(named) == len(differ) == 10  # "10 of these 25 differ from the right verdict"


def test_numbers_are_no_verdicts(tmp_path: Path) -> None:
    case = {"id": "a", "input": [{"gold": "5", "response": "\\boxed{5}", "verdict": True}]}
    assert verdict(case, tmp_path, judged_by(lambda gold, response: 1)) == "wrong"  # type: ignore[arg-type, return-value]
    case["input"][0]["verdict"] = 1  # type: ignore[index]
    assert verdict(case, tmp_path, judged_by(in_process)) == "not understood"


def test_a_table_that_stands_alone_is_one_case(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    rows = [{"id": n, "gold": str(n), "prediction": f"0{n}", "right": True} for n in range(3)]
    file.write_text(json.dumps({"policy": "zeros in front", "triples": rows}))
    [case] = read_cases(file)
    assert (case.id, case.rule) == ("table", "zeros in front")
    status, text = run(file, implementation=judged_by(lambda gold, response: gold != "1"))
    assert status == 1
    assert "(3 checks)" in text
    assert "right/1 ('01' against '1'): got False, expected True" in text
    file.write_text(json.dumps({"id": "one", "input": [{"gold": "1", "response": "1", "verdict": True}]}))
    assert [case.id for case in read_cases(file)] == ["one"]


def test_this_package_judges_in_its_worker_processes(tmp_path: Path) -> None:
    """The default judge, the wall clock, a second call, memory and all four callers, on an item that explodes."""
    case = {
        "id": "hang",
        "input": {
            "items": [["5", "\\boxed{5}"], ["5", "\\boxed{7^{7^{7^{7}}}}"], ["no gold", "\\boxed{5}"]],
            "limit_seconds": 20,
            "call_from": ["main thread", "worker thread", "asyncio task", "spawned process", "a dream"],
        },
        "expected": {
            "verdicts": [True, False, None],
            "total_wall_seconds": "at most 3 x limit + 5 run one by one",
            "after": "a second call right after gives the same verdicts; "
            "resident memory of the trainer grows by less than 200 MB; the moon is full",
        },
    }
    status, text = run(write(tmp_path / "c.json", case))
    assert status == 0, text
    # verdicts, seconds, second call, memory; four callers
    assert "(8 checks)" in text
    assert "not checked: after/moon is full, call_from/a dream" in text


# Verifiers that hang (G12), by judges that are functions.


def hanging_case(**expected: Any) -> dict[str, Any]:
    return {
        "id": "h",
        "input": {
            "items": [["1", "a"], ["1", "b"]],
            "limit_seconds": 0.5,
            "call_from": ["worker thread", "main thread"],
        },
        "expected": {
            "verdicts": [True, False],
            "total_wall_seconds": "at most 2 x limit + 0 run one by one",
            **expected,
        },
        "known_wrong_answers": {"its own limit": "item 2 does not return; parse() raises ValueError from a thread"},
    }


def letters(gold: str, response: str) -> bool | None:
    return "a" in response or "1" in response


def test_verdicts_inside_the_limit_are_right(tmp_path: Path) -> None:
    assert verdict(hanging_case(), tmp_path, judged_by(letters)) == "right"
    assert verdict(hanging_case(verdicts=[True, True]), tmp_path, judged_by(letters)) == "wrong"


def test_a_judge_that_hangs_is_wrong_named_and_does_not_hang_the_command(tmp_path: Path) -> None:
    def hangs(gold: str, response: str) -> bool | None:
        if response == "b":
            threading.Event().wait(30)
        return letters(gold, response)

    start = time.perf_counter()
    status, text = run(write(tmp_path / "c.json", hanging_case()), implementation=judged_by(hangs))
    assert time.perf_counter() - start < 5
    assert status == 1
    assert "got did not return within 1 s" in text
    assert "this is the answer of the fault 'its own limit'" in text
    assert "not checked: total_wall_seconds, call_from" in text


def test_a_judge_for_the_main_thread_only_is_wrong_and_named(tmp_path: Path) -> None:
    def signals(gold: str, response: str) -> bool | None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signal only works in main thread")
        return letters(gold, response)

    status, text = run(write(tmp_path / "c.json", hanging_case()), implementation=judged_by(signals))
    assert status == 1
    assert "raised ValueError: signal only works in main thread" in text
    assert "this is the answer of the fault 'its own limit'" in text


def test_a_second_call_with_other_verdicts_is_wrong(tmp_path: Path) -> None:
    seen: list[str] = []

    def forgets(gold: str, response: str) -> bool | None:
        seen.append(response)
        return letters(gold, response) if seen.count(response) < 2 else None

    case = hanging_case(after="a second call right after gives the same verdicts")
    status, text = run(write(tmp_path / "c.json", case), implementation=judged_by(forgets))
    assert status == 1
    assert "after/second call, run one by one: got [None, None], expected [True, False]" in text


def test_bounds_with_workers_are_given_to_the_judge(tmp_path: Path) -> None:
    asked: list[int] = []

    @contextmanager
    def judge(limit: float, workers: int) -> Iterator[Any]:
        asked.append(workers)
        yield lambda pairs: [letters(*pair) for pair in pairs]

    bound = "at most 2 x limit + 1 run one by one, at most limit + 1 with 3 workers, and the moon"
    case = hanging_case(total_wall_seconds=bound)
    status, text = run(write(tmp_path / "c.json", case), implementation=replace(OURS, math_judge=judge))
    assert status == 0, text
    assert asked == [1, 3, 1]  # each bound, then the callers
    assert "not checked: total_wall_seconds/moon" in text


# Programs (G13).


def programs_judged_by(answer: Callable[[str, Any], bool | None]) -> tuple[Implementation, list[tuple[float, int]]]:
    limits = []

    @contextmanager
    def judge(seconds: float, memory_mb: int) -> Iterator[Any]:
        limits.append((seconds, memory_mb))
        yield lambda pairs: [answer(program, problem) for program, problem in pairs]

    return replace(OURS, code_judge=judge), limits


def test_programs_by_their_verdicts_and_the_limits_of_the_rule(tmp_path: Path) -> None:
    case = case_named("code_cases.json", "G13")
    right = {program["program"]: program["verdict"] for program in case["input"]["programs"]}
    tested, limits = programs_judged_by(lambda program, problem: right[program])
    status, text = run(write(tmp_path / "c.json", case), implementation=tested)
    assert status == 0, text
    assert limits == [(4.0, 1024)]  # "4 s and 1 GiB per test"
    assert "(13 checks)" in text  # 12 programs, and g5 inside the limit
    case["rule"] = "1.5 s and 0.25 GiB per test"
    case["known_wrong_answers"] = {"lenient": "accepts everything"}
    for program in case["input"]["programs"]:
        program["lenient"] = True
    tested, limits = programs_judged_by(lambda program, problem: True)
    status, text = run(write(tmp_path / "c.json", case), implementation=tested)
    assert status == 1
    assert limits == [(1.5, 256)]
    assert text.count("this is the answer of the fault 'lenient'") == list(right.values()).count(False)


def test_this_package_judges_programs_in_its_sandbox(tmp_path: Path) -> None:
    case = {
        "id": "p",
        "input": {
            "problems": {"DOUBLE": {"tests": [["4\n", "8"]], "text": "print twice the number"}},
            "programs": [
                {"id": "a", "program": "print(2 * int(input()))", "problem": "DOUBLE", "verdict": True},
                {"id": "b", "program": "print(int(input()) + 2)", "problem": "DOUBLE", "verdict": False},
                {"id": "c", "program": "print(8)", "problem": "NOWHERE", "verdict": False},
            ],
        },
        "expected": "field 'verdict'",
    }
    status, text = run(write(tmp_path / "c.json", case))
    if re.search("not checked: programs: no isolation works", text):
        pytest.skip("no sandbox on this machine")
    assert status == 0, text
    assert "(2 checks)" in text
    assert "not checked: verdict/3" in text
    case["input"]["programs"][1]["verdict"] = True  # type: ignore[index]
    assert run(write(tmp_path / "c.json", case))[0] == 1
