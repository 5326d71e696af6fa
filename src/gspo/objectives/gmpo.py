"""Geometric-Mean Policy Optimization: tokens are clipped, then averaged as logarithms. arXiv 2507.20673."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gspo.objectives.base import check_terms, require_one_advantage_per_row
from gspo.objectives.clipping import check_bounds
from gspo.objectives.masking import masked_row_mean
from gspo.objectives.metrics import objective_metrics
from gspo.objectives.ratios import attach_gradient, bounded_exp
from gspo.types import ObjectiveOutput, Unit


@dataclass(frozen=True)
class GMPO:
    """``J = mean_i A_i exp(mean_t clip(d_it))``; loss = -J. d_it = log pi_it - log old_it.

    clip is one-sided, on the side to which the advantage pushes: ``min(d, clip_high)`` where A_i > 0 and
    ``max(d, -clip_low)`` where A_i < 0. The bounds are log ratios: 0.4 is a ratio of e^0.4 = 1.49. Without a cut it is
    GSPO without bounds; a cut token is a constant and leaves the other tokens of its response in the gradient,
    ``s_i A_i / |y_i| * grad log pi_it``. The mean of the log ratios is bounded at 10 where it is exponentiated.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4
    name: ClassVar[str] = "gmpo"
    unit: ClassVar[Unit] = "sequence"

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``. ``loss_sum`` is over sequences; one advantage per response.

        Raises:
            ValueError: (N, T) advantages that differ inside a response.
        """
        terms = check_terms(logprobs, old_logprobs, advantages, response_mask)
        if advantages.dim() == 2:
            require_one_advantage_per_row(terms)
        log_ratio = terms.token_log_ratio
        low = (terms.advantages < 0) & (log_ratio < -self.clip_low)
        high = (terms.advantages > 0) & (log_ratio > self.clip_high)
        bounded = torch.where(high, self.clip_high, torch.where(low, -self.clip_low, log_ratio))
        # The gradient of the mean of the free tokens; the detached weight carries the value.
        free = terms.per_sequence(torch.where(low | high, terms.logprobs.detach(), terms.logprobs))
        ratio = attach_gradient(bounded_exp(masked_row_mean(bounded, terms.mask)), free)
        return ObjectiveOutput(
            loss_sum=-(ratio * terms.per_sequence(terms.advantages)).sum(),
            unit=self.unit,
            count=terms.num_sequences,
            metrics=objective_metrics(terms, low, high),
        )
