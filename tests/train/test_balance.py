"""The auxiliary load-balancing loss: its value, its gradient whatever the cut, and what it does to the routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo import launch
from gspo.config import load_recipe
from gspo.errors import ConfigError, ModelError, RunError
from gspo.events import read_events
from gspo.objectives import GRPO, GSPO
from gspo.policy.causal_lm import CausalPolicy, load_policy
from gspo.policy.logprobs import sequence_logprobs
from gspo.policy.moe.capture import RouteCapture, routing_shape
from gspo.policy.moe.families import find_routers
from gspo.policy.moe.replay import RoutingShape
from gspo.train.optimizer import Optimizer
from gspo.train.routing import RoutingSettings, StepRouting, expert_shares
from gspo.train.schedule import mini_batches
from gspo.train.step import MicroBatching, UpdateResult, update
from gspo.types import TrainBatch
from tests.policy.models import MOE as SHAPE
from tests.policy.models import small_policy
from tests.test_launch import BASE, LENGTHS, MOE
from tests.train.test_routing import prepared, rollouts

ONE_CUT = MicroBatching(None, 100_000)


class Kept(Optimizer):
    """Keeps the gradient and moves nothing."""

    gradient: Tensor

    def apply(self) -> float:
        self.gradient = torch.cat([p.grad.flatten() for p in self._parameters if p.grad is not None]).clone()
        return float(self.gradient.norm())


def kept(policy: CausalPolicy) -> Kept:
    return Kept(
        policy.model, learning_rate=1e-2, num_updates=9, warmup_steps=0, schedule="constant",
        betas=(0.9, 0.95), adam_eps=1e-8, weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip


def differentiated(
    coefficient: float,
    replay: Any = "none",
    cut: MicroBatching = ONE_CUT,
    objective: Any = None,
    advantages: float = 1.0,
) -> tuple[Tensor, UpdateResult, CausalPolicy, TrainBatch, StepRouting]:
    """Gradient and result of one mini-batch of all rows at the old weights."""
    policy = small_policy("qwen3_moe")
    batch = rollouts(policy)
    settings = RoutingSettings(routing_shape(policy), replay, "drift", coefficient)
    routing = StepRouting.of(settings, batch)
    assert routing is not None
    train = prepared(policy, routing, batch, "recompute")
    train.advantages.mul_(advantages)
    [mini] = mini_batches(train, 1, seed=0, step=1)
    optimizer = kept(policy)
    result = update(
        policy, optimizer, objective or GSPO(0.5, 0.5), train, mini, temperature=1.0, cut=cut, routing=routing
    )
    return optimizer.gradient, result, policy, train, routing


def by_hand(policy: CausalPolicy, train: TrainBatch) -> Tensor:
    """The loss from the routers' own outputs, each response alone in its row, no packing and no sharing."""
    layers: list[list[Tensor]] = [[] for _ in find_routers(policy.base)]
    chosen: list[list[Tensor]] = [[] for _ in layers]

    def keeping(index: int) -> Any:
        def hook(module: Any, arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            layers[index].append(output[0])
            chosen[index].append(output[2])

        return hook

    routers = find_routers(policy.base)
    hooks = [router.module.register_forward_hook(keeping(index)) for index, router in enumerate(routers)]
    sequences, keep = train.rollouts.sequences, []
    for row in range(len(sequences)):
        one = sequences.rows(torch.tensor([row]))
        sequence_logprobs(policy, one, 1.0)
        prompt, length = len(one.prompts[0]), int(one.lengths[0])
        keep.append(slice(prompt - 1, prompt + length - 1))
    for hook in hooks:
        hook.remove()
    total = torch.zeros(())
    for outputs, ids in zip(layers, chosen, strict=True):
        probabilities = torch.cat([o[k].float().softmax(-1) for o, k in zip(outputs, keep, strict=True)])
        picked = torch.cat([i[k] for i, k in zip(ids, keep, strict=True)])
        load = torch.nn.functional.one_hot(picked, probabilities.shape[1]).sum(dim=1).float().mean(dim=0)
        total = total + probabilities.shape[1] * (load * probabilities.mean(dim=0)).sum()
    return total / len(layers)


def test_value_and_gradient_are_the_formula_at_the_old_weights() -> None:
    gradient, result, policy, train, _ = differentiated(0.3)
    without, plain, *_ = differentiated(0.0)
    expected = by_hand(policy, train)
    value = float(expected.detach())
    assert result.metrics["moe/balance_loss"] == pytest.approx(value, rel=1e-5)
    assert result.metrics["loss"] - plain.metrics["loss"] == pytest.approx(0.3 * value, rel=1e-4)
    parameters = list(policy.model.parameters())
    found = torch.autograd.grad(expected, parameters, allow_unused=True)
    flat = torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
    )
    assert float(flat.norm()) > 1e-3
    assert torch.allclose(gradient - without, 0.3 * flat, atol=2e-6)


def test_with_one_layer_it_is_the_loss_of_transformers() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 4, generator=generator)
    ids = logits.topk(2, dim=-1).indices
    shape = RoutingShape(1, 2, 4)
    shares = expert_shares(
        [ids[:, None].to(shape.dtype)], torch.tensor([50]), torch.ones(1, 50, dtype=torch.bool), shape
    )
    assert float(shares.sum()) == pytest.approx(2)
    ours = 4 * (logits.softmax(-1) * shares[0]).sum(-1).mean()
    assert float(ours) == pytest.approx(float(load_balancing_loss_func((logits,), 4, 2)), rel=1e-6)


def test_only_tokens_that_predict_the_loss_are_counted() -> None:
    shape = RoutingShape(1, 1, 3)
    # A prompt of 2 and a response of 3: inputs 1, 2, 3 (of 0..3) predict it. Token 1 of the response is masked, and the
    # input before token 2 was left to the router.
    ids = torch.tensor([0, 1, 2, 255]).view(4, 1, 1).to(torch.uint8)
    mask = torch.tensor([[True, False, True, False]])
    assert expert_shares([ids], torch.tensor([3]), mask, shape).tolist() == [[0, 1, 0]]
    assert expert_shares([ids], torch.tensor([3]), ~mask & False, shape).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("replay", ["none", "r2", "r3"])
@pytest.mark.parametrize("cut", [MicroBatching(1, 1), MicroBatching(None, 60)], ids=["rows", "tokens"])
def test_the_gradient_does_not_depend_on_the_cut(replay: str, cut: MicroBatching) -> None:
    whole, at_once, *_ = differentiated(0.3, replay)
    parts, in_parts, *_ = differentiated(0.3, replay, cut)
    assert torch.allclose(whole, parts, atol=2e-6)
    assert in_parts.metrics["moe/balance_loss"] == pytest.approx(at_once.metrics["moe/balance_loss"], rel=1e-5)


def test_the_unit_of_the_objective_does_not_change_its_weight() -> None:
    by_unit = {}
    for unit in ("sequence", "token"):
        objective = GRPO(0.5, 0.5, unit)  # type: ignore[arg-type]
        with_it, without = (differentiated(c, objective=objective)[0] for c in (0.3, 0.0))
        by_unit[unit] = with_it - without
    assert torch.allclose(by_unit["sequence"], by_unit["token"], atol=2e-6)


def test_recomputed_activations_give_the_same() -> None:
    plain, one, *_ = differentiated(0.3)
    again, other = checkpointed(0.3)
    assert torch.allclose(plain, again, atol=2e-6)
    assert other.metrics["moe/balance_loss"] == pytest.approx(one.metrics["moe/balance_loss"], rel=1e-6)


def checkpointed(coefficient: float) -> tuple[Tensor, UpdateResult]:
    policy = load_policy(tiny="qwen3_moe", tiny_config=SHAPE, device="cpu", gradient_checkpointing=True)
    batch = rollouts(policy)
    routing = StepRouting.of(RoutingSettings(routing_shape(policy), "none", "drift", coefficient), batch)
    train = prepared(policy, routing, batch, "recompute")
    [mini] = mini_batches(train, 1, seed=0, step=1)
    optimizer = kept(policy)
    result = update(policy, optimizer, GSPO(0.5, 0.5), train, mini, temperature=1.0, cut=ONE_CUT, routing=routing)
    return optimizer.gradient, result


def test_rows_without_advantage_have_it_too() -> None:
    gradient, result, *_ = differentiated(0.3, advantages=0.0)
    assert float(gradient.norm()) > 1e-3
    assert result.metrics["tokens/skipped_forward"] == 0
    without, none, *_ = differentiated(0.0, advantages=0.0)
    assert float(without.norm()) == 0
    assert none.metrics["tokens/skipped_forward"] > 0
    assert "moe/balance_loss" not in none.metrics


def test_probabilities_carry_the_gradient_and_the_load_does_not() -> None:
    policy = small_policy("qwen3_moe")
    sequences = rollouts(policy).sequences
    shape = routing_shape(policy)
    capture = RouteCapture(shares=torch.full((shape.num_layers, shape.num_experts), 0.5), by_row=False)
    sequence_logprobs(policy, sequences, 1.0, capture=capture)
    assert capture.tokens is not None
    assert capture.tokens.balance is not None
    # An even load of K / E = 0.5 gives E * 0.5 * sum of P = 2 for every token, whatever the router thinks.
    assert torch.allclose(capture.tokens.balance, torch.full_like(capture.tokens.balance, 2.0))
    assert capture.tokens.balance.requires_grad


def run(tmp_path: Path, *words: str, text: str = MOE) -> list[dict[str, Any]]:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    loaded = load_recipe(recipe, [*LENGTHS, "--train.learning_rate", "1e-2", "--eval.num_samples", "1", *words])
    launch.train(loaded, run_dir=tmp_path / "run", command=["gspo", "train"])
    return read_events(tmp_path / "run" / "events.jsonl")


def test_descending_it_evens_the_load() -> None:
    policy = small_policy("qwen3_moe")
    batch = rollouts(policy)
    with torch.no_grad():
        for router in find_routers(policy.base):
            router.module.weight[:2].mul_(0.1)  # logits near 0: seldom among the best two of four
            router.module.weight[2:].mul_(3.0)
    optimizer = Optimizer(
        policy.model, learning_rate=5e-3, num_updates=99, warmup_steps=0, schedule="constant",
        betas=(0.9, 0.95), adam_eps=1e-8, weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    found = []
    for _ in range(15):
        routing = StepRouting.of(RoutingSettings(routing_shape(policy), "none", "drift", 1.0), batch)
        train = prepared(policy, routing, batch, "recompute")
        train.advantages.zero_()  # nothing else moves the weights
        [mini] = mini_batches(train, 1, seed=0, step=1)
        result = update(policy, optimizer, GSPO(), train, mini, temperature=1.0, cut=ONE_CUT, routing=routing)
        found.append(result.metrics)
    assert found[0]["moe/load_max"] > 1.5
    assert found[-1]["moe/load_max"] < 0.8 * found[0]["moe/load_max"]
    assert found[-1]["moe/load_entropy"] > found[0]["moe/load_entropy"]
    # K = 2 is an even load; a router may fall a little below it, since its choice and its probability are not the same.
    assert 1.9 < found[-1]["moe/balance_loss"] < found[0]["moe/balance_loss"]


def test_a_run_logs_it_each_step_and_each_update(tmp_path: Path) -> None:
    events = run(tmp_path, "--moe.load_balancing_coefficient", "0.01", "--moe.metrics", "none")
    for kind in ("step", "update"):
        values = [event["metrics"]["moe/balance_loss"] for event in events if event["type"] == kind]
        assert all(1.5 < value < 4 for value in values)
    assert not any("moe/drift" in event.get("metrics", {}) for event in events)


def test_it_needs_experts_and_their_routes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(BASE)
    word = ["--moe.load_balancing_coefficient", "0.1"]
    with pytest.raises(ConfigError, match=r"moe\.load_balancing_coefficient.*no experts"):
        load_recipe(recipe, [*LENGTHS, *word])
    policy = small_policy("qwen3_moe")
    batch = rollouts(policy, record=False)
    routing = StepRouting.of(RoutingSettings(routing_shape(policy), "none", "none", 0.1), batch)
    assert routing is not None
    with pytest.raises(RunError, match="neither the engine nor the trainer"):
        routing.begin_update(torch.arange(2), batch.sequences.lengths, batch.response_mask)
    with pytest.raises(ModelError, match="no experts"):
        routing_shape(small_policy())


def test_a_script_has_no_routes_to_count(tmp_path: Path) -> None:
    script, recipe = tmp_path / "script.jsonl", tmp_path / "recipe.toml"
    script.write_text("{}\n")
    recipe.write_text(MOE.replace("[rollout]\n", f'[rollout]\nengine = "scripted"\nscript = "{script}"\n'))
    with pytest.raises(ConfigError, match="counts the experts of every response, and a script has none"):
        load_recipe(recipe, [*LENGTHS, "--moe.load_balancing_coefficient", "0.1"])
