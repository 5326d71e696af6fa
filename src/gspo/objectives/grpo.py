"""Group Relative Policy Optimization: token ratios. arXiv 2402.03300; equations (2)-(3) of arXiv 2507.18071v2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.base import check_terms
from gspo.objectives.clipping import check_bounds, clipped_surrogate
from gspo.objectives.metrics import objective_metrics
from gspo.types import ObjectiveOutput, Unit


@dataclass(frozen=True)
class GRPO:
    """``J = mean_i mean_t min(w_it A_i, clip(w_it, 1 - clip_low, 1 + clip_high) A_i)``; loss = -J.

    ``w_it = pi_it / old_it``. unit "sequence" (default) is the paper's mean inside a response, then over responses.
    unit "token" is DAPO's mean over all tokens of the batch (arXiv 2503.14476, equation (8)), which weighs a response
    by its length. The log ratio of a token is bounded at 10 where it is exponentiated; the gradient of such a token
    keeps its direction with weight e^10.
    """

    clip_low: float = 0.2
    clip_high: float = 0.27
    unit: Unit = "sequence"
    name: ClassVar[str] = "grpo"

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)
        if self.unit not in get_args(Unit):
            raise ConfigError(f"grpo has no unit {self.unit!r}; it is 'sequence' or 'token'")

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``."""
        terms = check_terms(logprobs, old_logprobs, advantages, response_mask)
        clipped = clipped_surrogate(terms, terms.token_log_ratio, self.clip_low, self.clip_high)
        per_unit = terms.per_sequence(clipped.surrogate) if self.unit == "sequence" else clipped.surrogate
        return ObjectiveOutput(
            loss_sum=-per_unit.sum(),
            unit=self.unit,
            count=terms.count(self.unit),
            metrics=objective_metrics(terms, clipped.low, clipped.high),
        )
