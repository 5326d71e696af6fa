"""MiniRL: REINFORCE with token weights and a mask of tokens that went too far. arXiv 2512.01374."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gspo.objectives.base import check_terms
from gspo.objectives.clipping import check_bounds, clipped_surrogate
from gspo.objectives.metrics import objective_metrics
from gspo.types import ObjectiveOutput, Unit


@dataclass(frozen=True)
class MiniRL:
    """``grad J = mean_i sum_t M_it w_it A_i grad log pi_it``; loss = -J.

    ``w_it = pi_it / old_it``; M_it is 0 where A_i > 0 and w_it > 1 + clip_high, or A_i < 0 and w_it < 1 - clip_low, and
    1 elsewhere. Neither the sum nor the advantages are normalised (``advantage.scale = "none"``). The paper's weight
    is pi / mu, mu the engine's policy: that is w times ``[objective.correction] kind = "tis"`` (the paper caps old / mu
    at 5). A masked token has value 0 and gradient 0. The log ratio of a token is bounded at 10 where it is
    exponentiated.
    """

    clip_low: float = 0.2
    clip_high: float = 0.27
    name: ClassVar[str] = "minirl"
    unit: ClassVar[Unit] = "sequence"

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``. ``loss_sum`` is over sequences, each the sum of its tokens."""
        terms = check_terms(logprobs, old_logprobs, advantages, response_mask)
        clipped = clipped_surrogate(terms, terms.token_log_ratio, self.clip_low, self.clip_high)
        kept = torch.where(clipped.cut, torch.zeros_like(clipped.surrogate), clipped.surrogate)
        return ObjectiveOutput(
            loss_sum=-kept.sum(),
            unit=self.unit,
            count=terms.num_sequences,
            metrics=objective_metrics(terms, clipped.low, clipped.high),
        )
