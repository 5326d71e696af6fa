"""Sampling of one token per row, vectorised, from random streams that belong to the rows.

What a row draws depends on its seed, its place in the response and its logits; not on other rows, on the row's
slot, or on how many rows there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.rollout.embedded.library import load_decoding

#: Vocabulary entries summed at once on the way to the inverse of the distribution function.
BLOCK = 512


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) per row, float64, with 53 random bits; seeds (n,) and positions (n,) int64.

    SplitMix64 (Steele, Lea, Flood 2014) used as a counter: its state after `position` steps from a hashed seed
    is known without taking the steps.
    """
    state = _mix(seeds) + (positions + 1) * _signed(0x9E3779B97F4A7C15)
    return (_mix(state) >> 11 & ((1 << 53) - 1)).double() * 2.0**-53


def choose(logits: Tensor, temperature: float, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens (n,) int64 and their log-probs (n,) float32, from logits (n, V) float32 or float64.

    uniform: (n,) float64 in [0, 1), the quantile of each row's token; None is greedy and takes the largest logit (the
    lowest id among equals). The log-prob is that of softmax(logits / temperature).
    The logits are overwritten. A row with a logit that is nan or +inf gets a log-prob that is nan.
    """
    library = load_decoding(logits.dtype) if logits.device.type == "cpu" else None
    if library is not None:
        return library.choose(logits.contiguous(), temperature, None if uniform is None else uniform.contiguous())
    return choose_by_torch(logits, temperature, uniform)


def choose_by_torch(logits: Tensor, temperature: float, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same in operations of torch, for other devices and for machines without a compiler."""
    if temperature != 1:
        logits.div_(temperature)
    top = logits.amax(dim=1, keepdim=True)
    shifted = logits.sub_(top)
    weights = torch.exp(shifted)
    if uniform is None:
        tokens, total = logits.argmax(dim=1), weights.sum(dim=1)
    else:
        tokens, total = _invert(weights, uniform)
    chosen = shifted.gather(1, tokens[:, None])[:, 0]
    return tokens, (chosen - total.log()).float()


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose cumulative weight exceeds uniform * total, and the total; weights (n, V) at least 0.

    Large vocabularies are searched in two steps, first among sums of blocks, so that no (n, V) float64 exists.
    """
    size = weights.shape[1]
    if size <= 2 * BLOCK:
        return _search(weights, uniform)
    whole = size // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(dim=2, dtype=torch.float64)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(dim=1, keepdim=True, dtype=torch.float64)], dim=1)
    cumulative = sums.cumsum(dim=1)
    total = cumulative[:, -1]
    block = _first_above(cumulative, uniform * total)
    before = (cumulative - sums).gather(1, block[:, None])[:, 0]
    place = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, place.clamp_max(size - 1)).masked_fill_(place >= size, 0.0)
    within = inside.cumsum(dim=1, dtype=torch.float64)
    return block * BLOCK + _first_above(within, uniform * total - before), total.to(weights.dtype)


def _search(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1]
    return _first_above(cumulative, uniform * total), total.to(weights.dtype)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index with cumulative > target; never one of weight 0, even if rounding lifts the target to the sum."""
    last = cumulative[:, -1]
    below = torch.nextafter(last, torch.zeros_like(last))
    target = torch.minimum(target, below).clamp_min(0.0)
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return index.clamp_max(cumulative.shape[1] - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of an int64 read as unsigned."""
    return x >> bits & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return value - (1 << 64) if value >= 1 << 63 else value
