"""Replay through ``sequence_logprobs``: packed rows, shared prompts, gradients, activation recomputation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gspo.errors import ModelError, RunError
from gspo.policy.causal_lm import CausalPolicy
from gspo.policy.logprobs import sequence_logprobs
from gspo.policy.moe.capture import RouteCapture, routing_shape
from gspo.policy.moe.families import find_routers
from gspo.policy.moe.packing import check_routes, num_inputs, pack_routes, unpack_routes
from gspo.policy.packing import pack
from gspo.types import Sequences

from ..models import gradients, small_policy, some_sequences, worst_difference


def record(policy: CausalPolicy, sequences: Sequences, **options: Any) -> RouteCapture:
    capture = RouteCapture(**options)
    with torch.no_grad():
        sequence_logprobs(policy, sequences, 1.0, capture=capture)
    return capture


def random_routes(policy: CausalPolicy, sequences: Sequences, seed: int = 0) -> tuple[Tensor, ...]:
    """K different experts for every input token; the prompt of a group has the same in each of its rows."""
    shape = routing_shape(policy)
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> Tensor:
        order = torch.rand(length, shape.num_layers, shape.num_experts, generator=generator).argsort(-1)
        return order[..., : shape.top_k].to(shape.dtype)

    prompts = [draw(len(prompt)) for prompt in sequences.prompts]
    result = []
    for row, length in enumerate(num_inputs(sequences)):
        prompt = prompts[int(sequences.prompt_index[row])]
        result.append(torch.cat([prompt, draw(length - len(prompt))]) if length else prompt[:0])
    return tuple(result)


def disturb_routers(policy: CausalPolicy, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for router in find_routers(policy.base):
            router.module.weight += size * torch.randn(router.module.weight.shape, generator=generator)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_unchanged_weights_r2_is_bit_equal_to_no_replay(share: bool, checkpointing: bool) -> None:
    policy, sequences = small_policy("qwen3_moe"), some_sequences()
    if checkpointing:
        policy.model.activation_checkpointing_enable({"use_reentrant": False})
    routes = record(policy, sequences).routes
    plain = sequence_logprobs(policy, sequences, 0.7, share_prompts=share).logprobs
    replayed = sequence_logprobs(policy, sequences, 0.7, share_prompts=share, routing=routes).logprobs
    assert torch.equal(replayed, plain)
    weights = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1))
    want, got = (gradients(policy, (weights * x).sum()) for x in (plain, replayed))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_recording_changes_nothing() -> None:
    policy, sequences = small_policy("qwen3_moe"), some_sequences()
    plain = sequence_logprobs(policy, sequences, 1.0).logprobs
    capture = RouteCapture(with_margins=True, scores="own")
    recorded = sequence_logprobs(policy, sequences, 1.0, capture=capture).logprobs
    assert torch.equal(recorded, plain)
    assert [len(r) for r in capture.routes] == num_inputs(sequences) == [15, 1, 9, 0, 16, 10]
    assert all(not x.requires_grad for x in (*capture.routes, *capture.log_scores))


class DenseBlock(nn.Module):
    """All experts for all tokens, weighed by a (S, E) matrix that is 0 off the route: the formula, written out."""

    def __init__(self, block: Any, forced: Tensor) -> None:
        super().__init__()
        self.gate, self.experts, self.forced = block.gate, block.experts, forced

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden[0]
        probabilities = (x @ self.gate.weight.T).exp()
        on_route = torch.zeros_like(probabilities).scatter(1, self.forced, 1.0)
        weights = probabilities * on_route / (probabilities * on_route).sum(1, keepdim=True)
        out = torch.zeros_like(x)
        for e in range(weights.shape[1]):
            gate, up = (x @ self.experts.gate_up_proj[e].T).chunk(2, dim=1)
            out = out + weights[:, e : e + 1] * ((nn.functional.silu(gate) * up) @ self.experts.down_proj[e].T)
        return out[None]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_values_and_all_gradients_equal_a_dense_reference(checkpointing: bool) -> None:
    policy, sequences = small_policy("qwen3_moe", "float64"), some_sequences()
    routes = random_routes(policy, sequences)
    reference = small_policy("qwen3_moe", "float64")  # the same weights
    shape = routing_shape(policy)
    dense = pack_routes(routes, sequences, pack(sequences, policy.device), shape.natural).long()
    for index, layer in enumerate(reference.base.layers):  # type: ignore[arg-type]
        layer.mlp = DenseBlock(layer.mlp, dense[:, index])
    if checkpointing:
        policy.model.activation_checkpointing_enable({"use_reentrant": False})
    want = sequence_logprobs(reference, sequences, 1.0).logprobs
    got = sequence_logprobs(policy, sequences, 1.0, routing=routes).logprobs
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mine, theirs = gradients(policy, (weights * got).sum()), gradients(reference, (weights * want).sum())
    assert worst_difference(mine, theirs) < 1e-9
    assert all(float(mine[name].abs().max()) > 0 for name in mine if name.endswith("gate.weight"))  # routers learn


def test_a_recomputed_layer_replays_the_routes_of_its_own_forward() -> None:
    """Two forwards with different routes are in flight before the first backward."""
    policy, sequences = small_policy("qwen3_moe"), some_sequences()
    first, second = random_routes(policy, sequences, 1), random_routes(policy, sequences, 2)

    def grads(checkpointing: bool) -> dict[str, Tensor]:
        policy.model.activation_checkpointing_disable()
        if checkpointing:
            policy.model.activation_checkpointing_enable({"use_reentrant": False})
        losses = [sequence_logprobs(policy, sequences, 1.0, routing=r).logprobs.sum() for r in (first, second)]
        with torch.no_grad():
            sequence_logprobs(policy, sequences, 1.0)  # and one without any
        return gradients(policy, losses[0] - 2 * losses[1])

    assert worst_difference(grads(True), grads(False)) < 1e-6


def test_forced_experts_are_used_when_the_router_has_moved() -> None:
    """The router's weights move, so the natural choice does; the recorded routes stay in force."""
    policy, sequences = small_policy("qwen3_moe"), some_sequences()
    routes = record(policy, sequences).routes
    disturb_routers(policy)
    moved = record(policy, sequences, reference=routes)
    assert moved.tokens is not None
    assert (moved.tokens.ids != moved.tokens.reference).any()
    capture = RouteCapture(reference=routes)
    replayed = sequence_logprobs(policy, sequences, 1.0, routing=routes, capture=capture).logprobs
    assert not torch.allclose(replayed, sequence_logprobs(policy, sequences, 1.0).logprobs, atol=1e-3)
    # By hand: routers whose choice is pinned to the recorded one give the same log-probs.
    shape = routing_shape(policy)
    dense = pack_routes(routes, sequences, pack(sequences, policy.device), shape.natural).long()
    pinned = CausalPolicy(copy.deepcopy(policy.model), policy.tokenizer, policy.stop_token_ids)
    for index, layer in enumerate(pinned.base.layers):  # type: ignore[arg-type]
        layer.mlp = DenseBlock(layer.mlp, dense[:, index])
    torch.testing.assert_close(replayed, sequence_logprobs(pinned, sequences, 1.0).logprobs, rtol=0, atol=1e-5)


def test_the_sentinel_routes_naturally_token_by_token() -> None:
    policy, sequences = small_policy("qwen3_moe"), some_sequences()
    routes = list(record(policy, sequences).routes)
    natural = [torch.full_like(r, 255) for r in routes]
    plain = sequence_logprobs(policy, sequences, 1.0).logprobs
    assert torch.equal(sequence_logprobs(policy, sequences, 1.0, routing=natural).logprobs, plain)
    # One token of row 4 is forced to other experts: what comes before it stays, bit for bit.
    row, prompt = 4, len(sequences.prompts[2])
    other = random_routes(policy, sequences, 5)[row][prompt + 1]
    assert (other.sort().values != routes[row][prompt + 1].sort().values).any()
    natural[row][prompt + 1] = other
    mixed = sequence_logprobs(policy, sequences, 1.0, routing=natural).logprobs
    torch.testing.assert_close(mixed[row, :2], plain[row, :2], rtol=0, atol=1e-6)
    assert not torch.allclose(mixed[row, 2:5], plain[row, 2:5], atol=1e-4)


@pytest.mark.parametrize("share", [True, False])
def test_packing_and_unpacking_is_the_identity(share: bool) -> None:
    policy, sequences = small_policy("qwen3_moe"), some_sequences()
    routes = random_routes(policy, sequences)
    packed = pack(sequences, policy.device, share)
    dense = pack_routes(routes, sequences, packed, 255)
    assert dense.shape[0] == len(packed.input_ids)
    for back, ids in zip(unpack_routes(dense, sequences, packed), routes, strict=True):
        assert torch.equal(back, ids)


@pytest.mark.parametrize("rows", [[0, 2], [5], [4, 1, 0], [3, 4]])
def test_routes_follow_their_rows_into_micro_batches(rows: list[int]) -> None:
    policy, sequences = small_policy("qwen3_moe"), some_sequences()
    routes = random_routes(policy, sequences)
    whole = sequence_logprobs(policy, sequences, 1.0, routing=routes).logprobs
    index = torch.tensor(rows)
    part = sequence_logprobs(policy, sequences.rows(index), 1.0, routing=[routes[i] for i in rows]).logprobs
    torch.testing.assert_close(part, whole[index, : part.shape[1]], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: [*r[:2], r[2][:-1], *r[3:]], r"row 2 are \(8, 2, 2\).*9 input tokens.*\(9, 2, 2\)"),
        (lambda r: [r[0][:, :1], *r[1:]], r"row 0 are \(15, 1, 2\)"),
        (lambda r: [r[0].long(), *r[1:]], r"torch.int64.*torch.uint8"),
        (lambda r: r[:-1], "routes of 5 rows for 6 sequences"),
        (lambda r: [r[0].clone().fill_(4), *r[1:]], "row 0 name expert 4; the model has 4 experts"),
    ],
)
def test_routes_of_something_else_are_refused(spoil: Any, message: str) -> None:
    policy, sequences = small_policy("qwen3_moe"), some_sequences()
    routes = list(random_routes(policy, sequences))
    check_routes(routes, sequences, routing_shape(policy))
    with pytest.raises(RunError, match=message):
        sequence_logprobs(policy, sequences, 1.0, routing=spoil(routes))


def test_routes_of_a_dense_model_are_refused() -> None:
    with pytest.raises(ModelError, match="has no experts"):
        sequence_logprobs(small_policy(), some_sequences(), 1.0, capture=RouteCapture())


def test_a_copied_model_has_hooks_of_its_own() -> None:
    policy, sequences = small_policy("qwen3_moe"), some_sequences()
    record(policy, sequences)  # the hooks are there
    other = CausalPolicy(copy.deepcopy(policy.model), policy.tokenizer, policy.stop_token_ids)
    disturb_routers(other)
    want = sequence_logprobs(policy, sequences, 1.0).logprobs
    capture = record(other, sequences)
    assert torch.equal(sequence_logprobs(policy, sequences, 1.0).logprobs, want)
    hooks = [r.module.__dict__["routing_hook"] for p in (policy, other) for r in find_routers(p.base)]
    assert len(set(map(id, hooks))) == 4
    assert all(
        hook.router.module is router.module for hook, router in zip(hooks[2:], find_routers(other.base), strict=True)
    )
    assert len(capture.routes) == 6


def test_a_forward_around_the_modules_is_noticed() -> None:
    policy, sequences = small_policy("qwen3_moe"), some_sequences()
    layer: Any = policy.base.layers[1]  # type: ignore[index]
    layer.mlp.forward = lambda hidden: hidden
    with pytest.raises(RunError, match=r"routers \[1\] of 2 were not seen"):
        record(policy, sequences)
