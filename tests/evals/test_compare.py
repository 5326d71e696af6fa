"""Comparing evaluations: paired, permuted, adjusted; and what must not be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import ConfigError, DataError
from gspo.evals.compare import compare, load_evaluation, load_evaluations
from gspo.events import EventWriter


def write(path: Path, passed: list[int], *, scored: int = 4, **changes: Any) -> Path:
    identity = {"data": "d", "judge policy": "j", "protocol": "p", "prompt template": "t"} | changes.pop("identity", {})
    problems = [
        {"id": f"q{i}", "num_scored": scored, "num_passed": c, "components": {"lax": [scored, scored]}}
        for i, c in enumerate(passed)
    ]
    path.write_text(json.dumps({"name": "b", "metrics": {}, "identity": identity, "problems": problems, **changes}))
    return path


def test_differences_are_paired_by_problem_and_adjusted_together(tmp_path: Path) -> None:
    first = load_evaluation(write(tmp_path / "a.json", [0, 1, 2, 0, 1, 2]))
    better = load_evaluation(write(tmp_path / "b.json", [1, 2, 3, 1, 2, 3]))
    same = load_evaluation(write(tmp_path / "c.json", [1, 0, 2, 0, 1, 2]))
    up, level = compare([first, better, same])
    # six differences of +1/4: only the patterns of all plus and all minus are as extreme, 2 of 2^6
    assert (up.found.difference, up.found.p_value, up.p_holm) == (0.25, 2 / 64, 4 / 64)
    # +1/4 and -1/4, the rest 0: every pattern is as extreme as a sum of 0
    assert (level.found.difference, level.found.p_value, level.p_holm) == (0.0, 1.0, 1.0)
    assert up.label == str(tmp_path / "b.json")


def test_problems_that_one_could_not_score_are_left_out(tmp_path: Path) -> None:
    first = load_evaluation(write(tmp_path / "a.json", [1, 2]))
    other = write(tmp_path / "b.json", [3, 2])
    fields = json.loads(other.read_text())
    fields["problems"][1] |= {"num_scored": 0, "num_passed": 0}
    other.write_text(json.dumps(fields))
    (found,) = compare([first, load_evaluation(other)])
    assert (found.found.num_prompts, found.found.difference) == (1, 0.5)


def test_a_component_can_be_compared(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.json", [0, 4]) for name in "ab"]
    lax = [load_evaluation(path, "lax") for path in paths]
    assert lax[0].counts == {"q0": (4, 4), "q1": (4, 4)}
    with pytest.raises(ConfigError, match="has no component 'strict'; it has lax"):
        load_evaluation(paths[0], "strict")


def test_held_out_evaluations_are_compared_by_their_prompts(tmp_path: Path) -> None:
    def held_out(name: str, outcomes: list[list[int]], prompts: str | None) -> Path:
        path = tmp_path / name
        asked = {} if prompts is None else {"prompts": prompts}
        path.write_text(json.dumps({"name": "held_out", "metrics": {}, "outcomes": outcomes, **asked}))
        return path

    one, two = held_out("a.json", [[4, 1], [4, 2]], "x"), held_out("b.json", [[4, 2], [4, 3]], "x")
    (found,) = compare([load_evaluation(one), load_evaluation(two)])
    assert found.found.difference == 0.25
    with pytest.raises(ConfigError, match="different problems"):
        compare([load_evaluation(one), load_evaluation(held_out("c.json", [[4, 2], [4, 3]], "y"))])
    with pytest.raises(DataError, match="does not say on which prompts"):
        load_evaluation(held_out("d.json", [[4, 2]], None))


def test_what_cannot_be_compared_is_refused_and_what_differs_is_said(tmp_path: Path) -> None:
    first = load_evaluation(write(tmp_path / "a.json", [1, 2]))
    for changes, sentence in (
        ({"identity": {"data": "other"}}, "of different problems"),
        ({"name": "other"}, "of different problems"),
        ({"identity": {"judge policy": "other"}}, "judged by different rules"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            compare([first, load_evaluation(write(tmp_path / "b.json", [1, 2], **changes))])
    with pytest.raises(ConfigError, match="at least two evaluations"):
        compare([first])
    hotter = load_evaluation(write(tmp_path / "c.json", [1, 3], identity={"protocol": "hot"}))
    assert compare([first, hotter])[0].notes == ("the protocol is not the same",)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError, match="is not an evaluation"):
        load_evaluation(tmp_path / "x.json")
    with pytest.raises(DataError, match="is not an evaluation"):
        load_evaluation(tmp_path / "nowhere")


def test_the_evaluations_of_a_run_are_compared_with_its_first(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with EventWriter(tmp_path / "run" / "events.jsonl") as events:
        for step, name, passed in ((5, "sft", 0), (0, "held_out", 1), (10, "held_out", 2), (20, "held_out", 3)):
            outcomes = [[4, passed]] * 6
            fields = {"metrics": {}, "num_prompts": 6, "num_samples": 4, "confidence": 0.95, "outcomes": outcomes}
            events.write("evaluation", step=step, name=name, **fields)
    found = load_evaluations([tmp_path / "run"])
    assert [evaluation.label.rpartition(" ")[2] for evaluation in found] == ["0", "10", "20"]
    first, second = compare(found)
    # six equal differences: 2 of 2^6 patterns are as extreme; the two comparisons are adjusted together
    assert [(one.found.difference, one.found.p_value, one.p_holm) for one in (first, second)] == [
        (0.25, 2 / 64, 4 / 64),
        (0.5, 2 / 64, 4 / 64),
    ]
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "events.jsonl").touch()
    with pytest.raises(DataError, match="has made no evaluation"):
        load_evaluations([tmp_path / "none"])
