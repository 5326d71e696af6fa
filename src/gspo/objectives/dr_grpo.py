"""GRPO done right: no division by the length of the response. arXiv 2503.20783, section 3.2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.base import check_terms
from gspo.objectives.clipping import check_bounds, clipped_surrogate
from gspo.objectives.metrics import objective_metrics
from gspo.types import ObjectiveOutput, Unit


@dataclass(frozen=True)
class DrGRPO:
    """``J = mean_i sum_t min(w_it A_i, clip(w_it, 1 - clip_low, 1 + clip_high) A_i) / length_divisor``; loss = -J.

    ``w_it = pi_it / old_it``. length_divisor is one constant for all responses (the response limit of the run), so
    that a token weighs the same in a short and in a long response. The advantages of the paper are r - mean
    (``advantage.scale = "none"``). The log ratio of a token is bounded at 10 where it is exponentiated.
    """

    length_divisor: float
    clip_low: float = 0.2
    clip_high: float = 0.2
    name: ClassVar[str] = "dr_grpo"
    unit: ClassVar[Unit] = "sequence"

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)
        if not 0 < self.length_divisor < float("inf"):
            raise ConfigError(f"length_divisor = {self.length_divisor} is not a number of tokens; it must be above 0")

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``. ``loss_sum`` is over sequences."""
        terms = check_terms(logprobs, old_logprobs, advantages, response_mask)
        clipped = clipped_surrogate(terms, terms.token_log_ratio, self.clip_low, self.clip_high)
        return ObjectiveOutput(
            loss_sum=-clipped.surrogate.sum() / self.length_divisor,
            unit=self.unit,
            count=terms.num_sequences,
            metrics=objective_metrics(terms, clipped.low, clipped.high),
        )
