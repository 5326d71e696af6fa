import pytest

from gspo.errors import RewardError
from gspo.rewards.audit import audit
from gspo.rewards.base import RewardSet, WeightedReward
from gspo.rewards.builtin import build_rewards
from gspo.types import Prompt

from .test_builtin import Settings, Task


def prompts(golds, column="answer", **more):
    return [Prompt(f"f.jsonl:{i}", "?", (1,), columns={column: g, **more}) for i, g in enumerate(golds, 1)]


def own(function, name="own:reward"):
    return RewardSet([WeightedReward(name, function)])


@pytest.mark.parametrize(("name", "golds"), [("number", ["7", "8", "10"]), ("exact_match", ["a", "b"])])
def test_sound_rewards_pass(name, golds):
    with build_rewards([Settings(name)], num_workers=1) as rewards:
        report = audit(prompts(golds), rewards)
    assert report.ok
    assert report.findings == ()
    assert report.num_prompts == len(golds)


def test_math_passes_on_formulas():
    with build_rewards([Settings("math")], num_workers=1) as rewards:
        assert audit(prompts(["\\frac{1}{2}", "x^2+1", "(1,2)"]), rewards).ok


def test_a_task_passes_by_its_worked_solution():
    rows = [
        Prompt("t/0", "1+2=", (1,), "arithmetic:addition", {"answer": "3", "solution": "1+2=3;3", "task_args": ["3"]}),
        Prompt("t/1", "1+3=", (1,), "arithmetic:addition", {"answer": "4", "solution": "1+3=4;4", "task_args": ["4"]}),
    ]
    with build_rewards([], num_workers=1, task=Task()) as rewards:
        assert audit(rows, rewards).ok


def test_a_gold_that_the_verifier_cannot_read():
    with build_rewards([Settings("number")], num_workers=1) as rewards:
        report = audit(prompts(["7", "seven"]), rewards)
    assert not report.ok
    assert "1 of 2 prompts cannot be scored: f.jsonl:2" in report.findings[0]
    assert "'seven' holds no number" in report.findings[0]


def test_a_reward_that_likes_empty_answers():
    report = audit(prompts(["7", "8"]), own(lambda completions: [1.0 / (1 + len(c)) for c in completions]))
    assert not report.ok
    assert "an empty answer gets 1 where the gold answer '7' gets 0.5 (2 of 2 prompts" in report.findings[0]


def test_a_constant_reward():
    report = audit(prompts(["7", "8"]), own(lambda completions: [1.0] * len(completions)))
    assert report.findings == ("the reward is constant: gold, empty and junk answers all get 1",)


def test_a_reward_that_does_not_look_at_the_answer():
    report = audit(prompts(["7", "8", "9"]), own(lambda completions: [float(c.isdigit()) for c in completions]))
    assert any("the gold answer of another prompt" in finding for finding in report.findings)


def test_an_unknown_scale_is_accepted():
    def reward(completions, answer):
        return [-3.0 - (g not in c) - 0.01 * len(c) for c, g in zip(completions, answer, strict=True)]

    assert audit(prompts(["7", "1234567"]), own(reward)).ok


def test_equal_golds_in_other_spelling_are_no_finding():
    with build_rewards([Settings("number")], num_workers=1) as rewards:
        assert audit(prompts(["7", "7.0", "8", "9", "11"]), rewards).ok


def test_without_gold_answers_the_report_says_so():
    report = audit(prompts(["7"], column="level"), own(lambda completions: [1.0] * len(completions)))
    assert report.ok
    assert "1 of 1 prompts have no gold answer in column 'answer'" in report.notes[0]


def test_without_gold_answers_a_broken_reward_is_still_found():
    with pytest.raises(RewardError, match="raised ZeroDivisionError"):
        audit(prompts(["7"], column="level"), own(lambda completions: [1 / len(c) for c in completions]))


def test_only_the_first_prompts_are_looked_at():
    assert (
        audit(
            prompts(map(str, range(50))), own(lambda completions: [1.0] * len(completions)), num_prompts=4
        ).num_prompts
        == 4
    )
