"""Custom benchmarks and our own sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.data.sets import load_set
from gspo.errors import ConfigError, DataError
from gspo.evals.benchmark import Answer
from gspo.evals.custom import CUSTOM
from gspo.evals.frame import run
from gspo.evals.graders import IntegerGrader
from gspo.evals.own import OWN_INTEGERS, OWN_PROGRAMS
from gspo.evals.registry import BENCHMARKS, find_benchmark
from gspo.evals.sampling import GivenSampler


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_prompts_and_answers_of_a_file(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "3+3="}]
    path = write(
        tmp_path / "a.jsonl",
        {"id": "x", "prompt": "2+2=", "answer": "4", "date": "2026-01-02", "level": 1},
        {"id": "y", "prompt": chat, "reward_model": {"ground_truth": "6"}},
    )
    found = CUSTOM.load([path], {"verifier": "integer"})
    first, second = found.problems
    assert (first.id, first.prompt, first.gold, first.date) == ("x", "2+2=", "4", "2026-01-02")
    assert first.columns == {"level": 1}
    assert (second.prompt, second.gold) == (tuple(chat), "6")
    assert found.notes == ("prompt from 'prompt', gold from 'answer', id from 'id'",)
    grader = CUSTOM.make_grader({"verifier": "integer"}, found)
    assert isinstance(grader, IntegerGrader)
    assert [g.value for g in grader.grade(found.problems, [Answer("4"), Answer("5")])] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "verifier", "sentence"),
    [
        ({"prompt": "p"}, "math", r"a\.jsonl, line 2, column 'answer': is missing"),
        ({"answer": "1"}, "math", r"a\.jsonl, line 2: has no column 'prompt'"),
        ({"prompt": [], "answer": "1"}, "math", r"a\.jsonl, line 2: the column 'prompt' has no messages"),
        ({"prompt": "p", "answer": "half"}, "integer", r"line 2, column 'answer': is 'half', which is no integer"),
        ({"prompt": "p", "answer": {"tests": []}}, "code", r"line 2, column 'answer': the problem has no tests"),
        ({"prompt": "p", "answer": "1", "id": "x"}, "math", r"1 of 2 rows have an id; give one to all of them"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, row: dict[str, Any], verifier: str, sentence: str) -> None:
    good = {"prompt": "p", "answer": {"tests": [["1", "1"]]} if verifier == "code" else "7"}
    with pytest.raises(DataError, match=sentence):
        CUSTOM.load([write(tmp_path / "a.jsonl", good, row)], {"verifier": verifier})


def test_gold_answers_are_read_by_their_verifier_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "p", "answer": "7"}, {"prompt": "q", "answer": "seven"})
    found = CUSTOM.load([path], {"verifier": "number"})
    with pytest.raises(DataError, match=r"a\.jsonl, line 2, column 'answer': .*holds no number"):
        CUSTOM.make_grader({"verifier": "number"}, found)


def test_a_verifier_must_be_named_and_known(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "p", "answer": "7"})
    for options, sentence in (({}, "needs --verifier NAME"), ({"verifier": "maths"}, r"did you mean 'math'\?")):
        with pytest.raises(ConfigError, match=sentence):
            CUSTOM.load([path], options)


def test_a_function_of_the_user_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judge.py").write_text(
        "def same(completions, answer, **columns):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    monkeypatch.chdir(tmp_path)
    options = {"verifier": "judge.py:same"}
    found = CUSTOM.load([write(tmp_path / "a.jsonl", {"prompt": "p", "answer": "abc"})], options)
    grader = CUSTOM.make_grader(options, found)
    result = run(CUSTOM, found, options, GivenSampler({"1": ["abc", "abd"]}, found.problems), grader, tmp_path / "out")
    grader.close()
    assert result["metrics"]["pass@1"] == 0.5
    assert result["judge"]["policy"] == {"verifier": "judge.py:same"}


def test_own_integers_are_solved_by_their_keys_and_by_nothing_else(tmp_path: Path) -> None:
    found = OWN_INTEGERS.load([], {})
    rows = load_set("integers")
    assert len(found.problems) == len(rows) == 60
    samples = {
        row["id"]: [f"It is \\boxed{{{row['answer']}}}.", f"\\boxed{{{int(row['answer']) + 1}}}"] for row in rows
    }
    grader = OWN_INTEGERS.make_grader({}, found)
    result = run(OWN_INTEGERS, found, {}, GivenSampler(samples, found.problems), grader, tmp_path)
    assert result["metrics"]["pass@1"] == 0.5
    assert {(problem["num_passed"], problem["num_scored"]) for problem in result["problems"]} == {(1, 2)}


def test_own_programs_are_solved_by_their_solutions_in_the_box(tmp_path: Path) -> None:
    found = OWN_PROGRAMS.load([], {})
    solutions = {row["id"]: row["solution"] for row in load_set("programs")}
    assert all(problem.date.startswith("2024-") for problem in found.problems)
    few = [problem for problem in found.problems if problem.columns == {}][:3]
    samples = {problem.id: [f"```python\n{solutions[problem.id]}\n```", "```python\nprint()\n```"] for problem in few}
    grader = OWN_PROGRAMS.make_grader({}, found)
    result = run(OWN_PROGRAMS, found, {}, GivenSampler(samples, found.problems), grader, tmp_path)
    assert [problem["num_passed"] for problem in result["problems"] if problem["num_scored"]] == [1, 1, 1]
    assert result["metrics"]["missing_fraction"] == pytest.approx(21 / 24)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_registered_benchmark_is_there_under_its_name(name: str) -> None:
    assert find_benchmark(name).name == name


def test_unknown_benchmarks_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no benchmark 'aime'; did you mean 'aime24'\?"):
        find_benchmark("aime")
