"""The policy loss of DAPO: token ratios, a wider upper bound, a mean over tokens. arXiv 2503.14476, equation (8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gspo.objectives.base import check_terms
from gspo.objectives.clipping import check_bounds, clipped_surrogate
from gspo.objectives.metrics import objective_metrics
from gspo.types import ObjectiveOutput, Unit


@dataclass(frozen=True)
class DAPO:
    """``J = sum_i sum_t min(w_it A_i, clip(w_it, 1 - clip_low, 1 + clip_high) A_i) / sum_i |y_i|``; loss = -J.

    ``w_it = pi_it / old_it``. It is GRPO with unit "token" and DAPO's bounds. The rest of DAPO lies elsewhere:
    ``train.groups_without_signal = "refill"`` samples dynamically, ``train.truncated = "exclude"`` filters overlong
    responses. The log ratio of a token is bounded at 10 where it is exponentiated.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    name: ClassVar[str] = "dapo"
    unit: ClassVar[Unit] = "token"

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``. ``loss_sum`` is over tokens."""
        terms = check_terms(logprobs, old_logprobs, advantages, response_mask)
        clipped = clipped_surrogate(terms, terms.token_log_ratio, self.clip_low, self.clip_high)
        return ObjectiveOutput(
            loss_sum=-clipped.surrogate.sum(),
            unit=self.unit,
            count=terms.num_tokens,
            metrics=objective_metrics(terms, clipped.low, clipped.high),
        )
