"""The halves of a layer and the experts against the same formulas in plain torch, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gspo.policy import layer as layers
from gspo.policy.experts import Experts
from gspo.policy.layer import AttentionHalf, AttentionSetting, GatedHalf, NormBranch, is_heard, row_blocks
from gspo.policy.logprobs import sequence_logprobs
from gspo.policy.native import Native, load_native
from gspo.policy.packed_attention import SharedPrompt, make_plan

from .models import small_policy, some_sequences

pytestmark = pytest.mark.skipif(load_native(torch.float32) is None, reason="no C compiler here: torch code is used")
DTYPES = [(torch.float32, 2e-5), (torch.float64, 1e-12)]
SIZE, INNER, HEAD = 24, 40, 16


def kernels(dtype: torch.dtype) -> Native:
    found = load_native(dtype)
    assert found is not None
    return found


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) / 3).to(dtype).requires_grad_()


def compare(ours: Tensor, theirs: Tensor, inputs: list[Tensor], bound: float) -> None:
    """Values and the gradients of all inputs, which must not depend on how often they are asked for."""
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=bound)
    upstream = torch.cos(torch.arange(ours.numel(), dtype=ours.dtype)).view(ours.shape)
    found = torch.autograd.grad(ours, inputs, upstream, retain_graph=True)
    again = torch.autograd.grad(ours, inputs, upstream)
    for a, b, c in zip(found, again, torch.autograd.grad(theirs, inputs, upstream), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, atol=bound * float(c.abs().max() + 1), rtol=bound)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_both_ways_through_a_norm(dtype: torch.dtype, bound: float) -> None:
    x, weight = numbers(70, SIZE, dtype=dtype, seed=0), numbers(SIZE, dtype=dtype, seed=1)
    through, around = NormBranch.apply(x, weight, 1e-5, kernels(dtype))
    compare(through * 2 + around.sin(), plain_norm(x, weight, 1e-5) * 2 + x.sin(), [x, weight], bound)
    _, around = NormBranch.apply(x, weight, 1e-5, kernels(dtype))
    (only_around,) = torch.autograd.grad(around.sum(), x)
    assert torch.equal(only_around, torch.ones_like(x))


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("num_rows", [1, 50])  # one block; several, the last one shorter
def test_a_gated_mlp_in_blocks_of_rows(
    dtype: torch.dtype, bound: float, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "BLOCK_ROWS", 16)
    x, skip = (numbers(num_rows, SIZE, dtype=dtype, seed=seed) for seed in (0, 1))
    gate, up = (numbers(INNER, SIZE, dtype=dtype, seed=seed) for seed in (2, 3))
    down = numbers(SIZE, INNER, dtype=dtype, seed=4)
    ours = GatedHalf.apply(x, skip, gate, up, down, kernels(dtype))
    theirs = skip + (nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    compare(ours, theirs, [x, skip, gate, up, down], bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize(
    ("rows", "size", "inner"),
    [
        (130, 167, 97),  # no multiple of a tile anywhere
        (300, 160, 544),  # more columns than are finished at a time, and rows that go past the cache
        (65, 1030, 33),  # deeper than products whose numbers are taken from the cache
    ],
)
def test_a_gated_mlp_of_any_shape_on_any_number_of_threads(
    dtype: torch.dtype, bound: float, rows: int, size: int, inner: int
) -> None:
    x, gate, up = (numbers(*s, dtype=dtype, seed=i) for i, s in enumerate(((rows, size), (inner, size), (inner, size))))
    down = numbers(size, inner, dtype=dtype, seed=3)
    inputs = [x, gate, up, down]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            ours = GatedHalf.apply(x, x, gate, up, down, kernels(dtype))
            found.append([ours, *torch.autograd.grad(ours.square().sum(), inputs)])
    finally:
        torch.set_num_threads(before)
    plain = x + (nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    for a, b in zip(found[0], [plain, *torch.autograd.grad(plain.square().sum(), inputs)], strict=True):
        torch.testing.assert_close(a, b, atol=bound * float(b.abs().max() + 1), rtol=bound)
    if kernels(dtype).has_tiles:  # torch's products, which weights' gradients go to without them, need not
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, gate, up = (numbers(*shape, dtype=torch.float32, seed=0) for shape in ((5, SIZE), (INNER, SIZE), (INNER, SIZE)))
    down = numbers(SIZE, INNER, dtype=torch.float32, seed=1)
    up.requires_grad_(False)
    GatedHalf.apply(x, x, gate, up, down, kernels(torch.float32)).sum().backward()
    assert up.grad is None
    assert gate.grad is not None
    assert down.grad is not None


@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 17, 100])
def test_blocks_of_rows_cover_all_rows_once(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "BLOCK_ROWS", 16)
    blocks = row_blocks(num_rows)
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(num_rows))
    lengths = [block.stop - block.start for block in blocks]
    assert max(lengths) == lengths[0] <= 16


PLAN = make_plan([(0, 5), (5, 3), (8, 40)], [SharedPrompt((5, 48), (0, 5))], torch.arange(48))


def plain_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """(48, heads, D): a prompt of 5 and two responses to it."""
    seen = torch.zeros(48, 48, dtype=torch.bool)
    for start, stop in ((0, 5), (5, 8), (8, 48)):
        seen[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
    seen[5:, :5] = True
    repeats = query.shape[1] // key.shape[1]
    scores = torch.einsum("ihd,jhd->hij", query, key.repeat_interleave(repeats, 1)) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, value.repeat_interleave(repeats, 1))


def plain_rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cosine[:, None] + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sine[:, None]


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_an_attention_half(dtype: torch.dtype, bound: float, normed: bool, biased: bool) -> None:
    x, skip = (numbers(48, SIZE, dtype=dtype, seed=seed) for seed in (0, 1))
    widths = [4 * HEAD, 2 * HEAD, 2 * HEAD]
    weights = [numbers(width, SIZE, dtype=dtype, seed=2) for width in widths]
    weights.append(numbers(SIZE, 4 * HEAD, dtype=dtype, seed=3))
    biases: list[Any] = [numbers(len(w), dtype=dtype, seed=4) if biased else None for w in weights]
    norms: list[Any] = [numbers(HEAD, dtype=dtype, seed=5 + i) if normed else None for i in range(2)]
    angles = numbers(48, HEAD, dtype=dtype, seed=7).detach()
    tables = (angles.cos(), angles.sin())
    setting = AttentionSetting(kernels(dtype), PLAN, tables, HEAD, 1e-6, 1e-5, 0.3, None)
    ours = AttentionHalf.apply(x, skip, setting, *weights, *biases, *norms)

    query, key, value = (
        nn.functional.linear(x, w, b).unflatten(1, (-1, HEAD)) for w, b in zip(weights[:3], biases[:3], strict=True)
    )
    if normed:
        query, key = plain_norm(query, norms[0], 1e-6), plain_norm(key, norms[1], 1e-5)
    attended = plain_attention(plain_rotate(query, *tables), plain_rotate(key, *tables), value, 0.3)
    theirs = skip + nn.functional.linear(attended.flatten(1), weights[3], biases[3])
    inputs = [x, skip, *weights, *(p for p in (*biases, *norms) if p is not None)]
    compare(ours, theirs, inputs, 3 * bound)


@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("with_skip", [True, False])
def test_experts_equal_a_sum_over_experts(dtype: torch.dtype, bound: float, with_skip: bool) -> None:
    """Expert 2 of 5 has no token."""
    num_experts, tokens = 5, 30
    hidden, skip = (numbers(tokens, SIZE, dtype=dtype, seed=seed) for seed in (0, 1))
    gate_up = numbers(num_experts, 2 * INNER, SIZE, dtype=dtype, seed=2)
    down = numbers(num_experts, SIZE, INNER, dtype=dtype, seed=3)
    gates = numbers(tokens, 2, dtype=dtype, seed=4)
    first = torch.tensor([0, 1, 3, 4])[torch.arange(tokens) % 4]
    ids = torch.stack([first, torch.tensor([1, 3, 4, 0])[torch.arange(tokens) % 4]], dim=1)
    ours = Experts.apply(hidden, ids, gates, gate_up, down, skip if with_skip else None, kernels(dtype))
    theirs = skip if with_skip else torch.zeros_like(hidden)
    for expert in range(num_experts):
        a, b = (hidden @ gate_up[expert].t()).chunk(2, dim=1)
        weight = (gates * (ids == expert)).sum(1, keepdim=True)
        theirs = theirs + weight * ((nn.functional.silu(a) * b) @ down[expert].t())
    inputs = [hidden, gates, gate_up, down, *([skip] if with_skip else [])]
    compare(ours, theirs, inputs, bound)
    (unused,) = torch.autograd.grad(
        Experts.apply(hidden, ids, gates, gate_up, down, None, kernels(dtype)).sum(), gate_up
    )
    assert not unused[2].any()
    assert unused[3].any()


def test_a_module_with_a_hook_is_heard() -> None:
    module = nn.Linear(2, 2)
    assert not is_heard(module)
    handle = module.register_forward_hook(lambda *_: None)
    assert is_heard(module)
    handle.remove()
    assert not is_heard(module)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_norm_that_is_computed_again_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    again = layers.Norm.__call__
    monkeypatch.setattr(layers.Norm, "__call__", lambda self, x: (calls.append(len(x)), again(self, x))[1])
    found = []
    for least in (10**9, 0):
        monkeypatch.setattr(layers, "NORMED_AGAIN_FROM", least)
        policy = small_policy(kind)
        sequence_logprobs(policy, some_sequences(), 1.0).logprobs.sum().backward()
        found.append([parameter.grad for parameter in policy.model.parameters()])
        assert bool(calls) == (least == 0)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
