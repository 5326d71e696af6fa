from dataclasses import dataclass, field
from typing import Any

import pytest

from gspo.errors import InputError, RewardError
from gspo.rewards.builtin import TaskReward, VerifierReward, build_rewards
from gspo.rewards.pool import VerifierPool
from gspo.types import Prompt

from . import behaviours


@dataclass
class Settings:
    name: str
    weight: float = 1.0
    kind: str = "trl"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Task:
    name: str = "arithmetic:addition"
    scorer: str = "gspo.data.arithmetic:score_answer"


def prompt(gold, **columns):
    return Prompt("p", "?", (1,), columns={"answer": gold, **columns})


def test_verifiers_and_weights_together():
    with build_rewards([Settings("number", 1.0), Settings("exact_match", 0.5)], num_workers=1) as rewards:
        scores = rewards.score([prompt("7")] * 3 + [prompt("none")], ["7", "so 7", "8", "7"], [[1]] * 4)
    assert [s.value for s in scores] == [1.5, 1.0, 0.0, None]
    assert "holds no number" in scores[3].failure
    assert rewards.counters["items"] == 8


def test_a_task_is_scored_by_its_own_rule_by_default():
    with build_rewards([], num_workers=1, task=Task()) as rewards:
        scores = rewards.score([prompt("85", task_args=["85"])] * 2, ["7+8=15;85", "85"], [[1], [1]])
    assert [s.value for s in scores] == [1.0, 0.0]


def test_the_answer_column_is_the_users():
    with build_rewards([Settings("number")], num_workers=1, answer_column="gold") as rewards:
        assert rewards.score([Prompt("p", "?", (1,), columns={"gold": 7})], ["7"], [[1]])[0].value == 1.0
        with pytest.raises(RewardError, match="no column 'gold' with gold answers; there is 'answer'"):
            rewards.score([prompt("7")], ["7"], [[1]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings("numbr"), "neither built in .* did you mean 'number'"),
        (Settings("task"), "the reward 'task' scores generated tasks"),
        (Settings("number", options={"tolerance": 1}), "'number' has no options; it was given tolerance"),
        (Settings("nowhere_at_all:f"), "there is no module 'nowhere_at_all'"),
    ],
)
def test_what_cannot_be_built_is_refused(settings, message):
    with pytest.raises(RewardError, match=message):
        build_rewards([settings])


def test_no_reward_at_all_is_refused():
    with pytest.raises(RewardError, match=r"no reward is given.*exact_match, number, math, code, task"):
        build_rewards([])


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'gspo\[math\]'"):
        build_rewards([Settings("math")])


def test_a_crash_is_unscored_and_a_limit_is_wrong():
    with VerifierPool(1, 0.3) as pool:
        crash = TaskReward(f"{behaviours.__name__}:crash", pool)(["x"], task_args=[[]])[0]
        late = TaskReward(f"{behaviours.__name__}:hang_on", pool)(["x", "x"], task_args=[[60], [0]])
        assert "crashed" in crash.reason
        assert late == [0.0, 1.0]
        assert pool.counters["crashes"] == 1


def test_a_limit_with_a_readable_gold_is_wrong_and_without_one_unscored(monkeypatch):
    with VerifierPool(1, 0.3) as pool:
        reward = VerifierReward("gspo.rewards.number", pool)
        run = pool.run

        def slow(function, items, options=None):
            if function.endswith(":verify"):
                return run(f"{behaviours.__name__}:hang", [(60,)] * len(items))
            return run(function, items, options)

        monkeypatch.setattr(pool, "run", slow)
        wrong, unscored = reward(["7", "7"], answer=["7", "none"])
        assert wrong == 0.0
        assert "holds no number" in unscored.reason
        assert pool.counters["timeouts"] == 2
