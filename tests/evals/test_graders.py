"""Graders: what is right, wrong, unanswered and not judged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.errors import DataError
from gspo.evals.benchmark import Answer, Grade, Problem
from gspo.evals.graders import CodeGrader, IntegerGrader, RewardGrader, VerifierGrader, integer_of
from gspo.rewards.base import RewardSet, Unscored, WeightedReward
from gspo.sandbox import open_sandbox


def problem(gold: object) -> Problem:
    return Problem("p", "question", gold, "file.jsonl, line 1")


def grade(grader: IntegerGrader, gold: object, text: str) -> Grade:
    return grader.grade([problem(gold)], [Answer(text)])[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [("033", 33), ("33", 33), ("$33$", 33), ("n = 33", 33), ("m+n=33", 33), ("33^\\circ", 33), ("33.0", 33), ("-5", -5)]
    + [("\\text{33}", 33), ("1,000", 1000), ("33.", 33)]
    + [
        (text, None) for text in ("33.5", "66/2", "2^5", "x", "33,34", "(3,3)", "1010_2", "33%", "", "thirty", "9" * 65)
    ],
)
def test_integers_as_they_are_written(text: str, value: int | None) -> None:
    assert integer_of(text) == value


@given(
    value=st.integers(0, 999), zeros=st.integers(0, 3), form=st.sampled_from(["{}", "${}$", "n = {}", "\\text{{{}}}"])
)
def test_every_integer_is_itself_and_no_other(value: int, zeros: int, form: str) -> None:
    text = form.format("0" * zeros + str(value))
    assert integer_of(text) == value
    grader = IntegerGrader(0, 999)
    assert grade(grader, str(value), f"\\boxed{{{text}}}").value == 1.0
    assert grade(grader, str((value + 1) % 1000), f"\\boxed{{{text}}}").value == 0.0


@pytest.mark.parametrize(
    ("text", "value", "verdict", "answered"),
    [
        ("so \\boxed{033}", 1.0, "right", True),
        ("first \\boxed{033}, no: \\boxed{34}", 0.0, "wrong", True),
        ("<think>\\boxed{33}</think> I give up", 0.0, "no answer", False),
        ("<think>\\boxed{33}", 0.0, "no answer", False),
        ("", 0.0, "no answer", False),
        ("\\boxed{33.5}", 0.0, "not an integer", True),
        ("\\boxed{66/2}", 0.0, "not an integer", True),
        ("\\boxed{1033}", 0.0, "out of range", True),
        ("\\boxed{-33}", 0.0, "out of range", True),
        ("the answer is 33", 1.0, "right", True),
    ],
)
def test_the_integer_rung(text: str, value: float, verdict: str, answered: bool) -> None:
    found = grade(IntegerGrader(0, 999), "33", text)
    assert (found.value, found.verdict, found.answered) == (value, verdict, answered)


def test_a_verifier_runs_in_its_processes_and_names_its_rung() -> None:
    grader = VerifierGrader("number", num_workers=1)
    try:
        texts = ["it is 1,000", "it is 999", "nothing"]
        found = grader.grade([problem("1000")] * 3, [Answer(text) for text in texts])
        assert [(g.value, g.verdict, g.answered) for g in found] == [
            (1.0, "right (number)", True),
            (0.0, "wrong (number)", True),
            (0.0, "wrong (extraction)", False),
        ]
        (unjudged,) = grader.grade([problem("no number")], [Answer("7")])
        assert (unjudged.value, unjudged.verdict) == (None, "not judged (gold)")
        assert grader.unreadable("12") == ""
        assert "holds no number" in grader.unreadable("twelve")
        assert grader.policy["verifier"] == "number"
    finally:
        grader.close()


def test_programs_are_judged_in_boxes() -> None:
    task = problem({"tests": [["2\n", "4"], ["5\n", "25"]]})
    grader = CodeGrader(open_sandbox())
    right = "```python\nprint(int(input()) ** 2)\n```"
    wrong = "```python\nprint(int(input()) * 2)\n```"
    found = grader.grade([task] * 3, [Answer(right), Answer(wrong), Answer("```text\nno program\n```")])
    assert [(g.value, g.verdict, g.answered) for g in found] == [
        (1.0, "accepted", True),
        (0.0, "wrong answer", True),
        (0.0, "no program", False),
    ]
    with pytest.raises(DataError, match=r"file\.jsonl, line 1: the problem has neither"):
        grader.grade([problem({})], [Answer(right)])


def test_reward_functions_are_graders_and_their_terms_components() -> None:
    def short(completions: Sequence[str], **columns: object) -> list[float]:
        return [float(len(text) < 4) for text in completions]

    def gold(completions: Sequence[str], answer: Sequence[str], **columns: object) -> list[float | Unscored]:
        return [Unscored("broken") if t == "?" else float(t == a) for t, a in zip(completions, answer, strict=True)]

    both = RewardSet([WeightedReward("short", short, 0.5), WeightedReward("gold", gold, 0.5)])
    grader = RewardGrader(both, {"verifier": "test"})
    found = grader.grade([problem("abc")] * 3, [Answer("abc"), Answer("abcd"), Answer("?")])
    assert [g.value for g in found] == [1.0, 0.0, None]
    assert found[0].components == {"short": 1.0, "gold": 1.0}
    assert (found[2].verdict, "broken" in found[2].reason) == ("not judged", True)
    alone = RewardGrader(RewardSet([WeightedReward("gold", gold)]), {})
    assert alone.grade([problem("a")], [Answer(" ")])[0] == Grade(0.0, "wrong", "", answered=False)
    assert not any(math.isnan(g.value) for g in found if g.value is not None)
