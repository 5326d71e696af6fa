"""Clipped Importance Sampling Policy Optimization: the weight is clipped, not the token. arXiv 2506.13585."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gspo.objectives.base import check_terms
from gspo.objectives.clipping import check_bounds
from gspo.objectives.metrics import objective_metrics
from gspo.objectives.ratios import bounded_exp
from gspo.types import ObjectiveOutput, Unit


@dataclass(frozen=True)
class CISPO:
    """``J = sum_i sum_t sg[clip(w_it, 1 - clip_low, 1 + clip_high)] A_i log pi_it / sum_i |y_i|``; loss = -J.

    Equations (4) and (5). ``w_it = pi_it / old_it``. No token loses its gradient: beyond the bounds its weight is the
    bound. The paper has no lower bound, which is ``clip_low = 1`` here, and names no upper one; 1 + clip_high = 5 is
    ScaleRL's (arXiv 2510.13786).
    """

    clip_low: float = 1.0
    clip_high: float = 4.0
    name: ClassVar[str] = "cispo"
    unit: ClassVar[Unit] = "token"

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``. ``loss_sum`` is over tokens.

        The clip fractions count tokens whose weight is at a bound, whatever the sign of their advantage.
        """
        terms = check_terms(logprobs, old_logprobs, advantages, response_mask)
        log_ratio = terms.token_log_ratio
        low = log_ratio < (math.log1p(-self.clip_low) if self.clip_low < 1 else -math.inf)
        high = log_ratio > math.log1p(self.clip_high)
        weight = bounded_exp(log_ratio).clamp(max(0.0, 1 - self.clip_low), 1 + self.clip_high)
        return ObjectiveOutput(
            loss_sum=-(weight * terms.advantages * terms.logprobs).sum(),
            unit=self.unit,
            count=terms.num_tokens,
            metrics=objective_metrics(terms, low, high),
        )
