from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gspo.policy.packed_attention import PackedPlan, SharedPrompt, make_plan

# Prompt 0 (4 tokens) with responses of 3 and 30, prompt 1 (2 tokens) without, prompt 2 (5 tokens) with one of 1.
SEGMENTS = [(0, 4), (4, 3), (7, 30), (37, 2), (39, 5), (44, 1), (45, 0)]
SHARED = [SharedPrompt((4, 37), (0, 4)), SharedPrompt((44, 45), (39, 44))]
POSITIONS = torch.cat([torch.arange(4), torch.arange(4, 7), torch.arange(4, 34), torch.arange(2), torch.arange(6)])


def sees() -> Tensor:
    """(S, S) bool, from the definition: own segment up to oneself, and the shared prompt."""
    index = torch.arange(45)
    mask = torch.zeros(45, 45, dtype=torch.bool)
    for start, length in SEGMENTS:
        own = slice(start, start + length)
        mask[own, own] = index[own, None] >= index[own]
    for part in SHARED:
        mask[slice(*part.queries), slice(*part.keys)] = True
    return mask


def plan() -> PackedPlan:
    return make_plan(SEGMENTS, SHARED, POSITIONS)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("window", [None, 1000, 3])
def test_equals_masked_softmax_attention_and_its_gradients(
    window: int | None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("gspo.policy.packed_attention.native_for", lambda _: None)
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, heads, 45, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    mask = sees()
    if window is not None:
        mask = mask & (POSITIONS[:, None] - POSITIONS < window)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.4, enable_gqa=True
    ).transpose(1, 2)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, (query, key, value), grad)
    out = plan().attend(0, query, key, value, 0.4, window)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    for ours, theirs in zip(torch.autograd.grad(out, (query, key, value), grad), expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_every_token_is_in_exactly_one_bucket() -> None:
    rows = [b.rows if b.real is None else b.rows[b.real] for b in plan().buckets]
    assert torch.equal(torch.cat(rows).sort().values, torch.arange(45))


def test_buckets_waste_little_whatever_the_lengths() -> None:
    """Cost must follow real tokens: the rule 1.25 x + 8 bounds padding for any mixture of lengths."""
    torch.manual_seed(2)
    lengths = torch.randint(8, 513, (64,)).tolist()
    starts = [sum(lengths[:i]) for i in range(64)]
    made = make_plan(list(zip(starts, lengths, strict=True)), [], torch.cat([torch.arange(n) for n in lengths]))
    padded = sum(n * t for n, t in (bucket.shape for bucket in made.buckets))
    assert padded < 1.2 * sum(lengths)


def test_prompts_of_one_length_are_attended_to_together() -> None:
    """Three groups: two prompts of 4 whose responses take up 10 and 9 tokens, one of 5."""
    shared = [SharedPrompt((13, 23), (0, 4)), SharedPrompt((23, 32), (4, 8)), SharedPrompt((32, 40), (8, 13))]
    segments = [(0, 4), (4, 4), (8, 5), (13, 10), (23, 9), (32, 8)]
    made = make_plan(segments, shared, torch.zeros(40, dtype=torch.int64))
    assert [(bucket.queries.shape, bucket.keys.shape) for bucket in made.shared] == [
        ((2, 10), (2, 4)),
        ((1, 8), (1, 5)),
    ]
    assert made.shared[0].keys.span == (0, 8)  # side by side: read in place


def test_the_spans_of_the_kernel_put_each_prompt_before_its_responses() -> None:
    """Lengths 0 are left out; the prompt without responses is a group of its own."""
    sequences = plan().sequences
    assert sequences is not None
    first, second, third = [[0, 4, 0, 0], [4, 3, 0, 4], [7, 30, 0, 4]], [[37, 2, 0, 0]], [[39, 5, 0, 0], [44, 1, 39, 5]]
    assert sequences.spans.tolist() == first + second + third
    assert sequences.groups.tolist() == [0, 3, 4, 6]


def test_a_prompt_that_is_no_segment_is_left_to_torch() -> None:
    assert make_plan([(0, 4), (4, 3)], [SharedPrompt((4, 7), (0, 3))], torch.arange(7)).sequences is None


#: A prompt longer than a block of keys, responses longer than a block of queries, and both shorter.
LONG = [(0, 70), (70, 3), (73, 130), (203, 64), (267, 36)]


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 16), (3, 3, 64), (6, 1, 48)])
def test_blocks_of_the_kernel_equal_whole_attention(
    heads: int, key_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_plan(LONG, [SharedPrompt((70, 203), (0, 70))], torch.arange(303))
    torch.manual_seed(4)
    inputs = [torch.randn(1, h, 303, size, requires_grad=True) for h in (heads, key_heads, key_heads)]
    grad = torch.randn(1, 303, heads, size)

    def once() -> list[Tensor]:
        out = made.attend(0, *inputs, size**-0.5, None)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    ours, again = once(), once()
    monkeypatch.setattr("gspo.policy.packed_attention.native_for", lambda _: None)
    for a, b, c in zip(ours, again, once(), strict=True):
        assert torch.equal(a, b)  # to the last bit
        torch.testing.assert_close(a, c, atol=2e-5 * float(c.detach().abs().max()), rtol=0)
