"""DAPO's soft punishment of long responses, arXiv 2503.14476, equation (13)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo import launch
from gspo.config import load_recipe
from gspo.errors import RewardError
from gspo.events import read_events
from gspo.rewards.base import RewardSet, WeightedReward
from gspo.rewards.builtin import build_rewards
from gspo.rewards.overlong import OverlongReward, overlong_from_options
from gspo.types import Prompt, StopReason
from tests.test_launch import BASE

PROMPT = Prompt("p", "?", (1,), columns={"answer": "7"})


@dataclass
class Settings:
    name: str
    weight: float = 1.0
    kind: str = "trl"
    options: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("num_tokens", "value"),
    # max_tokens 100, buffer 20: flat to 80, then 1/20 a token, -1 from 100 on.
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0), (5000, -1.0)],
)
def test_the_formula(num_tokens: int, value: float) -> None:
    assert OverlongReward(100, 20).value(num_tokens, "eos") == pytest.approx(value, abs=1e-12)


def test_the_papers_setting() -> None:
    # 16,384 tokens are wanted and 4,096 tolerated: 20,480 in all; half way through the buffer costs half.
    paper = OverlongReward(20_480, 4_096)
    assert [paper.value(n, "eos") for n in (16_384, 18_432, 20_480)] == [0.0, -0.5, -1.0]


@given(max_tokens=st.integers(1, 10_000), share=st.floats(0, 1), lengths=st.lists(st.integers(0, 20_000), min_size=2))
def test_it_never_rises_with_length_and_has_no_jump_before_its_end(
    max_tokens: int, share: float, lengths: list[int]
) -> None:
    reward = OverlongReward(max_tokens, max(1, round(share * max_tokens)))
    values = [reward.value(n, "eos") for n in sorted(lengths)]
    assert all(v is not None and -1 <= v <= 0 for v in values)
    assert values == sorted(values, key=lambda v: -(v or 0.0))
    steps = [(reward.value(n, "eos") or 0.0) - (reward.value(n + 1, "eos") or 0.0) for n in range(max_tokens)]
    assert max(steps) <= 1 / reward.buffer + 1e-9


def test_a_response_that_the_engine_cut_off_is_too_long_whatever_its_length() -> None:
    reward = OverlongReward(100, 20)
    assert reward.value(7, StopReason.LENGTH) == -1.0
    assert reward.value(7, StopReason.STOP_STRING) == 0.0
    assert reward.value(700, None) is None  # nobody sampled it


def test_length_is_the_engines_record_and_not_the_text() -> None:
    with build_rewards(
        [Settings("number"), Settings("overlong", 0.5, options={"max_tokens": 4, "buffer": 2})], num_workers=1
    ) as rewards:
        asked = ([PROMPT] * 3, ["7"] * 3, [[1, 2], [1, 2, 3], [9, 9]])
        training = rewards.score(*asked, [StopReason.EOS, StopReason.EOS, StopReason.LENGTH])
        measured = rewards.score(*asked, [StopReason.EOS, StopReason.EOS, StopReason.LENGTH], shaping=False)
        stored = rewards.score(*asked)
    assert [s.value for s in training] == [1.0, 1.0 - 0.5 * 0.5, 1.0 - 0.5]
    assert [s.components["overlong"] for s in training] == [0.0, -0.5, -1.0]
    assert [s.value for s in measured] == [s.value for s in stored] == [1.0, 1.0, 1.0]
    assert "overlong" not in measured[0].components


def test_any_function_may_ask_for_the_stop_reasons() -> None:
    def cut(stop_reasons: list[str | None]) -> list[float]:
        return [float(reason == "length") for reason in stop_reasons]

    rewards = RewardSet([WeightedReward("cut", cut)])
    scores = rewards.score([PROMPT] * 2, ["a", "b"], [[1], [2]], [StopReason.LENGTH, StopReason.EOS])
    assert [s.value for s in scores] == [1.0, 0.0]
    assert rewards.score([PROMPT], ["a"], [[1]])[0].value == 0.0
    with pytest.raises(ValueError, match="2 prompts, 2 texts, 2 rows of ids, 1 reasons"):
        rewards.score([PROMPT] * 2, ["a", "b"], [[1], [2]], [StopReason.EOS])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer": 2}, "option max_tokens .* is missing"),
        ({"max_tokens": 8}, "option buffer .* is missing"),
        ({"max_tokens": 8.0, "buffer": 2}, "max_tokens .* is 8.0"),
        ({"max_tokens": 8, "buffer": 0}, "buffer .* is 0"),
        ({"max_tokens": 8, "buffer": 9}, "buffer = 9 above max_tokens = 8"),
        ({"max_tokens": 8, "buffer": 2, "max_token": 1}, "no option 'max_token'"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        overlong_from_options(options)


def test_a_run_is_punished_in_training_and_evaluated_without(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(BASE)
    functions = (
        '[{name = "tests.test_launch:even_length"}, {name = "overlong", weight = 0.25, '
        "options = {max_tokens = 6, buffer = 4}}]"
    )
    loaded = load_recipe(
        recipe, ["--reward.functions", functions, "--reward.audit", "false", "--train.num_logged_samples", "16"]
    )
    launch.train(loaded, run_dir=tmp_path / "run", command=["gspo", "train"])
    events = read_events(tmp_path / "run" / "events.jsonl")
    samples = [sample for event in events if event["type"] == "samples" for sample in event["samples"]]
    for sample in samples:
        ramp = -1.0 if sample["stop_reason"] == "length" else min(0, 2 - sample["num_tokens"]) / 4
        assert sample["components"]["overlong"] == pytest.approx(ramp)
        whole = sample["components"]["tests.test_launch:even_length"] + 0.25 * ramp
        assert sample["reward"] == pytest.approx(whole)
    assert {sample["stop_reason"] for sample in samples} == {"length", "eos"}
    steps = [event["metrics"] for event in events if event["type"] == "step"]
    assert all(-1 <= metrics["reward/overlong"] < 0 for metrics in steps)
