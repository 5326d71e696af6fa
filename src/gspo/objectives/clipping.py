"""The clipped surrogate: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and which side was cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.base import Terms
from gspo.objectives.ratios import attach_gradient, bounded_exp


@dataclass(frozen=True, eq=False)
class Clipped:
    """The surrogate of every token and where the min cut it. All (N, T)."""

    surrogate: Tensor  # 0 outside the mask
    low: Tensor  # bool: A < 0 and ratio < 1 - clip_low
    high: Tensor  # bool: A > 0 and ratio > 1 + clip_high

    @property
    def cut(self) -> Tensor:
        return self.low | self.high


def check_bounds(clip_low: float, clip_high: float) -> None:
    """Any bounds from 0 on are computed with; infinity means no bound on that side.

    Raises:
        ConfigError: a bound is negative or nan.
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise ConfigError(f"{name} = {value} is not a bound; it must be 0 or more")


def clipped_surrogate(
    terms: Terms, log_ratio: Tensor, clip_low: float, clip_high: float, band_scale: Tensor | None = None
) -> Clipped:
    """Equation (5) or (13) of arXiv 2507.18071 before any mean.

    Args:
        terms: checked inputs.
        log_ratio: (N, 1) for a sequence ratio or (N, T) for token ratios, detached.
        clip_low, clip_high: distance of the bounds from 1.
        band_scale: (N, 1), each row's log bounds are divided by it; None is 1.

    The ratio's value is exp(log_ratio) bounded at e^10; its gradient is that value times grad log pi, so the bound caps
    the weight of a token and never removes it. A cut token is a constant: its gradient is exactly 0.
    """
    scaled = log_ratio if band_scale is None else log_ratio * band_scale
    low, high = cut_sides(scaled, terms.advantages, clip_low, clip_high)
    ratio = attach_gradient(bounded_exp(log_ratio), terms.logprobs)
    free = ratio * terms.advantages
    # Finite stand-ins for bounds that never cut keep inf out of the unselected branch.
    lower = 1 - clip_low if math.isfinite(clip_low) else 0.0
    upper = 1 + clip_high if math.isfinite(clip_high) else 0.0
    at_low, at_high = (_at_bound(bound, band_scale) * terms.advantages for bound in (lower, upper))
    return Clipped(torch.where(high, at_high, torch.where(low, at_low, free)), low, high)


def _at_bound(bound: float, band_scale: Tensor | None) -> float | Tensor:
    """The ratio at a bound: bound ** (1 / band_scale); a bound that is not above 0 is never reached."""
    return bound if band_scale is None else max(bound, 0.0) ** (1 / band_scale)


def cut_sides(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """(low, high) bool: where the min takes the clipped branch. Broadcasts like its inputs.

    Compared as logarithms, where values near 0 keep their digits.
    """
    log_low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    log_high = math.log1p(clip_high)
    return (advantages < 0) & (log_ratio < log_low), (advantages > 0) & (log_ratio > log_high)
