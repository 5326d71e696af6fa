from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gspo.policy import kernels
from gspo.policy.kernels import BlockRule, backward_block, forward_block


def tensors(heads: int = 4, key_heads: int = 2, t: int = 5, keys: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((3, heads, t, 8), (3, key_heads, keys, 8), (3, key_heads, keys, 8))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)  # type: ignore[return-value]


def plain(query: Tensor, key: Tensor, value: Tensor, scale: float, hidden: Tensor) -> tuple[Tensor, Tensor]:
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).transpose(-1, -2) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value.repeat_interleave(repeats, 1), scores.logsumexp(-1)


def rules() -> list[tuple[str, BlockRule, Tensor]]:
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    place = torch.arange(5).expand(3, 5)
    far = (torch.arange(5)[:, None] - torch.arange(5)) >= 2
    return [
        ("all keys", BlockRule(0.3, causal=False), torch.zeros(5, 5, dtype=torch.bool)),
        ("causal", BlockRule(0.3, causal=True), causal),
        ("window", BlockRule(0.3, True, 2, place, place), causal | far),
    ]


@pytest.mark.parametrize(("name", "rule", "hidden"), rules(), ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("dense", [True, False])
def test_output_and_gradients_are_those_of_plain_softmax_attention(
    name: str, rule: BlockRule, hidden: Tensor, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dense:
        monkeypatch.setattr(kernels, "_flash_on_cpu", lambda *_: False)
        monkeypatch.setattr(kernels, "DENSE_SCORES", 3 * 4 * 5 * 2)  # two query rows at a time
    query, key, value = tensors()
    expected, expected_lse = plain(query, key, value, rule.scale, hidden)
    out, lse = forward_block(query.detach(), key.detach(), value.detach(), rule)
    torch.testing.assert_close(out, expected.detach(), atol=1e-12, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse.detach(), atol=1e-12, rtol=0)
    grad = torch.randn_like(out)
    expected.backward(grad)
    ours = backward_block(grad, query.detach(), key.detach(), value.detach(), out, lse, rule)
    for mine, tensor in zip(ours, (query, key, value), strict=True):
        torch.testing.assert_close(mine, tensor.grad, atol=1e-12, rtol=0)


def test_a_query_outside_every_key_gives_zero_output_and_gradient() -> None:
    """The prompt part of a late response token under a sliding window: no key, weight exp(-inf) = 0, no nan."""
    query, key, value = (tensor.detach() for tensor in tensors())
    rule = BlockRule(0.3, False, 2, torch.full((3, 5), 100), torch.arange(5).expand(3, 5))
    out, lse = forward_block(query, key, value, rule)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    for gradient in backward_block(torch.ones_like(out), query, key, value, out, torch.zeros_like(lse), rule):
        assert gradient.eq(0).all()


def test_two_blocks_joined_by_their_log_sum_exp_equal_one() -> None:
    query, key, value = (tensor.detach() for tensor in tensors())
    rule = BlockRule(0.3, causal=False)
    whole, whole_lse = forward_block(query, key, value, rule)
    parts = [forward_block(query, key[:, :, part], value[:, :, part], rule) for part in (slice(0, 2), slice(2, 5))]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    joined = sum(out * (part_lse - lse).exp()[..., None] for out, part_lse in parts)
    torch.testing.assert_close(joined, whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, whole_lse, atol=1e-12, rtol=0)
