"""evaluate(): what is counted as passed, failed and neither."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gspo.errors import ConfigError, DataError
from gspo.evals.base import EvaluationResult, Outcome, evaluate, outcome_of, pass_metrics
from gspo.evals.statistics import mean_interval
from gspo.events import find_metric
from gspo.types import Prompt, Rollout, RolloutGroup, Score, StopReason


def rollout(value: float | None, length: int = 3, stop: StopReason = StopReason.EOS) -> Rollout:
    return Rollout(
        token_ids=torch.zeros(length, dtype=torch.int64),
        response_mask=torch.ones(length, dtype=torch.bool),
        rollout_logprobs=torch.zeros(length),
        text="",
        stop_reason=stop,
        policy_version=0,
        score=Score(value),
    )


def prompt(name: str) -> Prompt:
    return Prompt(id=name, content=name, token_ids=(1,))


class Collector:
    """Gives each prompt the rewards written for it, and remembers what it was asked for."""

    def __init__(self, rewards: dict[str, list[float | None]]) -> None:
        self.rewards = rewards
        self.asked: dict[str, Any] = {}

    def __call__(
        self,
        prompts: Sequence[Prompt],
        engine: Any,
        params: Any,
        reward_set: Any,
        *,
        step: int,
        seed: int,
        group_size: int,
        decode: Callable[[Sequence[int]], str],
        purpose: str = "sample",
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        self.asked = {"step": step, "seed": seed, "group_size": group_size, "purpose": purpose, "engine": engine}
        groups = [RolloutGroup(p, tuple(rollout(v) for v in self.rewards[p.id])) for p in prompts]
        return groups, {"rollout": 1.0, "reward": 0.5}


def run(rewards: dict[str, list[float | None]], **options: Any) -> tuple[EvaluationResult, Collector]:
    collector = Collector(rewards)
    options = {"num_samples": 4, **options}
    result = evaluate(
        [prompt(name) for name in rewards],
        "engine",  # type: ignore[arg-type]
        "params",  # type: ignore[arg-type]
        "rewards",  # type: ignore[arg-type]
        decode=lambda ids: "",
        collect=collector,
        **options,
    )
    return result, collector


def test_pass_at_k_is_a_mean_over_prompts() -> None:
    result, collector = run(
        {"a": [1, 0, 0, 0], "b": [0, 0, 0, 0], "c": [1, 1, 1, 1], "d": [1, 1, 0, 0]}, k=(1, 2, 4), seed=5, step=7
    )
    # the dataset of tests/cases/evaluation_cases.json
    assert result.metrics["pass@1"] == pytest.approx(0.4375)
    assert result.metrics["pass@2"] == pytest.approx(0.583333333)
    assert result.metrics["pass@4"] == pytest.approx(0.75)
    interval = mean_interval([0.25, 0, 1, 0.5], 4)
    assert (result.metrics["pass@1/low"], result.metrics["pass@1/high"]) == (interval.low, interval.high)
    assert result.metrics["reward/mean"] == pytest.approx(7 / 16)
    assert result.metrics["unscored_fraction"] == 0
    assert "pass@1/if_unscored_wrong" not in result.metrics
    assert collector.asked == {"step": 7, "seed": 5, "group_size": 4, "purpose": "evaluation", "engine": "engine"}
    assert result.seconds == {"rollout": 1.0, "reward": 0.5}


def test_event_fields_fit_the_schema() -> None:
    result, _ = run({"a": [1, 0, None, 0], "b": [1, 1, 1, 1]}, k=(1, 2), confidence=0.9)
    fields = result.event_fields()
    assert fields["outcomes"] == [(3, 1), (4, 4)]
    assert (fields["num_prompts"], fields["num_samples"], fields["confidence"]) == (2, 4, 0.9)
    for name in (*fields["metrics"], *result.difference_metrics(result)):
        info = find_metric(name)
        assert info is not None, name
        assert "evaluation" in info.levels, name


def test_unscored_responses_count_neither_way_and_are_bounded() -> None:
    result, _ = run({"a": [1, None, None, 0], "b": [None] * 4, "c": [1, 1, 0, 0]}, k=(1, 4))
    assert result.metrics["pass@1"] == pytest.approx((1 / 2 + 2 / 4) / 2)  # b says nothing
    assert result.metrics["unscored_fraction"] == pytest.approx(6 / 12)
    assert result.metrics["pass@1/if_unscored_wrong"] == pytest.approx((1 / 4 + 0 + 2 / 4) / 3)
    assert result.metrics["pass@1/if_unscored_right"] == pytest.approx((3 / 4 + 1 + 2 / 4) / 3)
    assert result.metrics["pass@4"] == 1.0  # of c alone: the others have fewer than 4 verdicts
    assert result.metrics["reward/mean"] == pytest.approx(3 / 6)


def test_nothing_scored_is_nan_and_not_zero() -> None:
    result, _ = run({"a": [None] * 4})
    assert math.isnan(result.metrics["pass@1"])
    assert result.metrics["unscored_fraction"] == 1
    assert "reward/mean" not in result.metrics


def test_a_weighted_sum_reaches_its_threshold_despite_rounding() -> None:
    assert 0.7 + 0.2 + 0.1 < 1.0  # by rounding
    group = RolloutGroup(prompt("a"), (rollout(0.7 + 0.2 + 0.1), rollout(0.999), rollout(None), rollout(2.0)))
    assert outcome_of(group, 1.0) == Outcome("a", num_scored=3, num_passed=2, num_unscored=1)
    assert outcome_of(group, 0.5).num_passed == 3


def test_truncation_and_length_come_from_the_engine() -> None:
    class Lengths(Collector):
        def __call__(self, *args: Any, **options: Any) -> tuple[list[RolloutGroup], dict[str, float]]:
            made = (rollout(1.0, 2), rollout(0.0, 8, StopReason.LENGTH))
            return [RolloutGroup(p, made) for p in args[0]], {}

    result = evaluate(
        [prompt("a")],
        None,
        None,
        None,
        num_samples=2,
        decode=lambda ids: "",
        collect=Lengths({}),  # type: ignore[arg-type]
    )
    assert result.metrics["truncated_fraction"] == 0.5
    assert result.metrics["length/mean"] == 5.0


def test_what_cannot_be_measured_is_refused_before_sampling() -> None:
    collector = Collector({})
    for k in (5, 0):
        with pytest.raises(ConfigError, match=rf"pass@{k} needs at least {k} samples per prompt"):
            run({"a": [1] * 4}, k=(1, k))
    with pytest.raises(DataError, match="no prompts"):
        run({})
    assert collector.asked == {}


def test_difference_is_paired_by_prompt_and_leaves_out_what_either_could_not_score() -> None:
    before, _ = run({"a": [0] * 4, "b": [1, 0, 0, 0], "c": [None] * 4})
    after, _ = run({"a": [1, 1, 0, 0], "b": [1, 1, 0, 0], "c": [1] * 4})
    found = after.difference_from(before)
    assert found.difference == pytest.approx((0.5 + 0.25) / 2)
    assert found.num_prompts == 2
    assert after.difference_metrics(before)["difference/p_value"] == found.p_value == 0.5  # ++ and -- of four
    other, _ = run({"a": [0] * 4})
    with pytest.raises(ConfigError, match="are of different prompts; cannot pair them"):
        after.difference_from(other)


def test_pass_metrics_do_not_depend_on_the_order_of_prompts() -> None:
    outcomes = [Outcome("a", 4, 1), Outcome("b", 2, 2, 2), Outcome("c", 4, 0)]
    there, back = (pass_metrics(part, 4, (2,)) for part in (outcomes, outcomes[::-1]))
    assert there == pytest.approx(back)
