"""Corrections for data that another engine, or older weights, have sampled: detached weights on the advantages.

Three policies: pi is being trained, old anchors the ratio, mu is what the engine sampled from. A weight of at least 0
on a token's advantage is a weight on its part of the objective and changes no clip, since every objective is
proportional to the size of the advantage. It stays in the denominator, masked tokens too. One correction at a time:
pi / old (the objective's ratio) times old / mu (the correction) is the whole of pi / mu.

| kind | weight of a token | default bounds |
|---|---|---|
| tis | min(old / mu, high) | high 2 |
| icepop | old / mu where low <= old / mu <= high, else 0 | 0.5, 5 |
| seq_geo | 1 where low <= exp(mean_t log(old / mu)) <= high, else 0 | 0.999, 1.001 |
| seq_prod | 1 where low <= exp(sum_t log(old / mu)) <= high, else 0 | 0.5, 2 |
| negative_mask | 0 where A < 0 and mean_t log(mu / pi) > high, else 1 | high 0.03 nats per token |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.bundle import CORRECTION_BOUNDS, TOKEN_CORRECTIONS
from gspo.objectives.masking import masked_row_mean, select
from gspo.types import Metric


@dataclass(frozen=True)
class Correction:
    """One of the table above.

    Sources: tis, Yao et al. 2025, *Your Efficient RL Framework Secretly Brings You Off-Policy RL Training*; icepop,
    Ling team 2025, *Small Leak Can Sink a Great Ship*; seq_geo and seq_prod, Liu, Li et al. 2025, *When Speed Kills
    Stability*; negative_mask, DeepSeek-V3.2 (arXiv 2512.02556), which names no value for its bound.
    """

    kind: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in CORRECTION_BOUNDS:
            raise ConfigError(f"there is no correction {self.kind!r}; it is one of {', '.join(CORRECTION_BOUNDS)}")
        low, high = self.bounds
        if not 0 < high < math.inf or not 0 <= low < high:
            raise ConfigError(f"a {self.kind} correction needs 0 <= low < high, not low = {low:g} and high = {high:g}")

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high) in force; low is 0 where the kind has none."""
        low, high = CORRECTION_BOUNDS[self.kind]
        return (low or 0.0) if self.low is None else self.low, high if self.high is None else self.high

    @property
    def by_token(self) -> bool:
        """Whether the tokens of one response may get different weights."""
        return self.kind in TOKEN_CORRECTIONS

    @torch.no_grad()
    def weights(
        self, logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Weights (N, T) by token or (N,) by sequence, and what to log. What lies outside the mask is not read.

        Args:
            logprobs: (N, T) of pi; read by negative_mask only.
            old_logprobs, rollout_logprobs: (N, T) of old and mu.
            advantages: (N,).
            mask: (N, T) bool.
        """
        pi, old, mu = (_precise(x, mask) for x in (logprobs, old_logprobs, rollout_logprobs))
        low, high = self.bounds
        if self.by_token:
            ratio = (old - mu).clamp(max=math.log(high) + 1).exp()
            inside = (ratio >= low) & (ratio <= high)
            weights = select(ratio.clamp(max=high) if self.kind == "tis" else torch.where(inside, ratio, 0.0), mask)
        else:
            inside = self._kept(pi, old, mu, advantages, mask)
            weights = inside.to(pi.dtype)
        return weights, _metrics(weights, inside, mask)

    def _kept(self, pi: Tensor, old: Tensor, mu: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """(N,) bool: sequences that stay in."""
        low, high = self.bounds
        if self.kind == "negative_mask":
            return (advantages >= 0) | (masked_row_mean(mu - pi, mask) <= high)
        log_ratio = masked_row_mean(old - mu, mask) if self.kind == "seq_geo" else select(old - mu, mask).sum(-1)
        return (log_ratio >= (math.log(low) if low else -math.inf)) & (log_ratio <= math.log(high))


def corrected_advantages(advantages: Tensor, weights: Tensor) -> Tensor:
    """(N,) advantages times (N,) or (N, T) weights."""
    wide = advantages if weights.dim() == 1 else advantages[:, None]
    return wide * weights.to(advantages.dtype)


def _precise(logprobs: Tensor, mask: Tensor) -> Tensor:
    return select(logprobs.detach(), mask).to(torch.promote_types(logprobs.dtype, torch.float32))


def _metrics(weights: Tensor, inside: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Over tokens: mean weight, share of tokens without weight, share outside the bounds."""
    num_tokens = int(mask.sum())
    wide, within = ((x if x.dim() == 2 else x[:, None]).expand(mask.shape)[mask] for x in (weights, inside))
    return {
        "correction/weight": (float(wide.sum(dtype=torch.float64)), num_tokens),
        "correction/masked": (float((wide == 0).sum()), num_tokens),
        "correction/outside": (float((~within).sum()), num_tokens),
    }
