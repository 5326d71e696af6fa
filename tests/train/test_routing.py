"""Routes through one step: recorded while old log-probs are computed, forced and measured in the updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gspo.errors import RunError
from gspo.objectives import GSPO, Correction
from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.moe.capture import routing_shape
from gspo.policy.moe.families import find_routers
from gspo.rollout.base import GenerationRequest, SamplingParams
from gspo.rollout.embedded import EmbeddedEngine
from gspo.train.batch import rollout_batch, train_batch
from gspo.train.optimizer import Optimizer
from gspo.train.routing import RoutingSettings, StepRouting
from gspo.train.schedule import mini_batches
from gspo.train.step import MicroBatching, UpdateResult, old_logprobs, update
from gspo.types import Prompt, Rollout, RolloutBatch, RolloutGroup, Score, TrainBatch
from tests.policy.models import small_policy

CUT = MicroBatching(None, 60)  # several micro-batches, groups torn apart


def rollouts(policy: CausalPolicy, record: bool = True) -> RolloutBatch:
    params = SamplingParams(7, stop_token_ids=frozenset({3, 40}), record_routing=record)
    asked = [GenerationRequest(f"p{i}", tuple(range(5, 9 + i)), tuple(10 * i + s for s in range(4))) for i in range(4)]
    groups = []
    for request, completions in zip(asked, EmbeddedEngine(policy).generate(asked, params), strict=True):
        members = tuple(
            Rollout(
                c.token_ids, torch.ones(len(c.token_ids), dtype=torch.bool), c.logprobs, "", c.stop_reason, 0,
                Score(float(n % 2)), c.routing,
            )
            for n, c in enumerate(completions)
        )  # fmt: skip
        groups.append(RolloutGroup(Prompt(request.prompt_id, "", request.token_ids), members))
    return rollout_batch(groups)


def settings(policy: CausalPolicy, replay: Any, metrics: Any = "drift") -> RoutingSettings:
    return RoutingSettings(routing_shape(policy), replay, metrics)


def prepared(policy: CausalPolicy, routing: StepRouting | None, batch: RolloutBatch, choice: Any) -> TrainBatch:
    old, _ = old_logprobs(
        policy, batch, choice=choice, temperature=1.0, bound=1e-3, num_probe_rows=3, first_step=True, cut=CUT,
        routing=routing,
    )  # fmt: skip
    return train_batch(batch, old, advantage_scale="group_std", std_floor=1e-4, included=batch.response_mask.any(dim=1))


def one_step(
    replay: Any, choice: Any, metrics: Any = "drift", learning_rate: float = 3e-2, record: bool = True
) -> tuple[CausalPolicy, StepRouting | None, list[UpdateResult]]:
    policy = small_policy("qwen3_moe")
    batch = rollouts(policy, record)
    routing = StepRouting.of(settings(policy, replay, metrics), batch)
    train = prepared(policy, routing, batch, choice)
    optimizer = Optimizer(
        policy.model, learning_rate=learning_rate, num_updates=9, warmup_steps=0, schedule="constant",
        betas=(0.9, 0.95), adam_eps=1e-8, weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    results = [
        update(policy, optimizer, GSPO(0.5, 0.5), train, mini, temperature=1.0, cut=CUT, routing=routing)
        for mini in mini_batches(train, 3, seed=0, step=1)
    ]
    return policy, routing, results


@pytest.mark.parametrize(
    ("replay", "choice"), [("none", "recompute"), ("none", "auto"), ("r2", "recompute"), ("r3", "auto")]
)
def test_drift_starts_at_zero_and_grows_with_the_updates(replay: str, choice: str) -> None:
    _, routing, results = one_step(replay, choice)
    drift = [result.metrics["moe/drift"] for result in results]
    assert drift[0] == 0.0
    assert drift[-1] > 0.02
    assert results[-1].metrics["moe/load_max"] >= 1.0
    assert {"moe/drift/layer_00", "moe/drift/layer_01", "moe/margin"} <= results[0].metrics.keys()
    assert routing is not None
    assert routing.engine_metrics()["moe/engine_drift"] == 0.0  # the engine is the trained module


def test_the_first_update_is_the_same_with_and_without_r2_and_later_ones_are_not() -> None:
    none, r2 = (one_step(replay, "recompute")[2] for replay in ("none", "r2"))
    assert none[0].metrics["grad_norm"] == r2[0].metrics["grad_norm"]
    assert none[0].metrics["loss"] == r2[0].metrics["loss"]
    assert none[2].metrics["grad_norm"] != r2[2].metrics["grad_norm"]


def test_r3_forces_the_engines_routes_while_old_logprobs_are_computed_and_in_the_updates() -> None:
    """The routers move between sampling and scoring, as if the engine routed otherwise: R3 sees the engine's routes."""
    policy = small_policy("qwen3_moe")
    batch = rollouts(policy)
    with torch.no_grad():
        for router in find_routers(policy.base):
            router.module.weight.neg_()  # the other experts are chosen
    routing = {replay: StepRouting.of(settings(policy, replay), batch) for replay in ("none", "r2", "r3")}
    old = {replay: prepared(policy, routing[replay], batch, "recompute").old_logprobs for replay in routing}
    assert torch.equal(old["none"], old["r2"])
    assert not torch.allclose(old["r3"], old["r2"], atol=1e-3)
    found = {replay: step.engine_metrics()["moe/engine_drift"] for replay, step in routing.items() if step is not None}
    assert min(found.values()) > 0.5
    rows = torch.arange(3)
    assert routing["r3"] is not None
    assert batch.routing is not None
    forced = routing["r3"].training(rows)["routing"]
    assert all(a is b for a, b in zip(forced, batch.routing, strict=False))


def test_router_shift_is_zero_before_the_first_update_and_is_there_only_if_asked_for() -> None:
    for replay in ("r2", "r3"):
        _, _, results = one_step(replay, "recompute", "all")
        shift = [result.metrics["moe/router_shift"] for result in results]
        assert shift[0] < 1e-6
        assert shift[2] > shift[1] > 1e-4
    assert "moe/router_shift" not in one_step("r2", "recompute")[2][1].metrics


def test_without_metrics_and_replay_nothing_is_done() -> None:
    policy = small_policy("qwen3_moe")
    batch = rollouts(policy, record=False)
    assert batch.routing is None
    assert StepRouting.of(None, batch) is None
    assert StepRouting.of(settings(policy, "none", "none"), batch) is None
    _, _, results = one_step("r2", "recompute", "none", record=False)
    assert results[0].routing is None
    assert not any(name.startswith("moe/") for name in results[0].metrics)


def test_an_engine_that_records_nothing_still_allows_r2_and_its_metrics() -> None:
    _, routing, results = one_step("r2", "recompute", record=False)
    assert results[2].metrics["moe/drift"] > 0
    assert routing is not None
    assert routing.engine_metrics() == {}


def test_replay_without_routes_is_refused() -> None:
    policy = small_policy("qwen3_moe")
    batch = rollouts(policy, record=False)
    with pytest.raises(RunError, match=r'moe.replay = "r3".*recorded none'):
        StepRouting.of(settings(policy, "r3"), batch)
    with pytest.raises(RunError, match=r'train.old_logprobs = "recompute"'):
        one_step("r2", "engine")


def test_sums_over_micro_batches_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = one_step("r2", "recompute")[2]
    monkeypatch.setitem(globals(), "CUT", MicroBatching(None, 10_000))
    parts = one_step("r2", "recompute")[2]
    for one, other in zip(whole[:1], parts[:1], strict=True):
        names = [name for name in one.metrics if name.startswith("moe/")]
        assert {n: one.metrics[n] for n in names} == pytest.approx({n: other.metrics[n] for n in names}, abs=1e-6)


def test_a_correction_weighs_what_the_engine_sampled() -> None:
    """The engine's log-probs are shifted by log 2, so that old / engine = 2, the cap of tis: twice the gradient."""
    norms = {}
    for kind in ("none", "tis"):
        policy = small_policy("qwen3_moe")
        batch = rollouts(policy, record=False)
        train = prepared(policy, None, batch, "recompute")
        shifted = replace(batch, rollout_logprobs=batch.rollout_logprobs - 0.6931471)
        optimizer = Optimizer(
            policy.model, learning_rate=1e-6, num_updates=1, warmup_steps=0, schedule="constant", betas=(0.9, 0.95),
            adam_eps=1e-8, weight_decay=0.0, max_grad_norm=1e9,
        )  # fmt: skip
        objective = replace_with_token_form(kind)
        [mini] = mini_batches(train, 1, seed=0, step=1)
        result = update(
            policy, optimizer, objective, replace(train, rollouts=shifted), mini, temperature=1.0, cut=CUT,
            correction=None if kind == "none" else Correction(kind),
        )  # fmt: skip
        norms[kind] = result.metrics["grad_norm"]
        assert ("correction/weight" in result.metrics) == (kind == "tis")
    assert norms["tis"] == pytest.approx(2 * norms["none"], rel=1e-4)


def replace_with_token_form(kind: str) -> Any:
    from gspo.objectives import make_objective

    return make_objective("gspo", 0.5, 0.5, weighs_tokens=kind == "tis")
