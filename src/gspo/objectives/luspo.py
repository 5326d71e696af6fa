"""Length-Unbiased Sequence Policy Optimization: GSPO with every response weighed by its length. arXiv 2602.05261."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gspo.objectives.gspo import GSPOToken
from gspo.objectives.metrics import objective_metrics
from gspo.types import ObjectiveOutput


@dataclass(frozen=True)
class LUSPO(GSPOToken):
    """``J = mean_i |y_i| min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)``; loss = -J.

    s_i is GSPO's sequence ratio. The factor takes the 1 / |y_i| out of GSPO's gradient: a token of a long response
    counts as much as one of a short response. Computed as a sum over tokens of the GSPO-token surrogate.
    """

    clip_low: float = 2e-3
    clip_high: float = 2.5e-3
    name: ClassVar[str] = "luspo"

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``. ``loss_sum`` is over sequences, each weighed by its number of tokens."""
        terms = self._terms(logprobs, old_logprobs, advantages, response_mask)
        clipped = self._clipped(terms)
        return ObjectiveOutput(
            loss_sum=-clipped.surrogate.sum(),
            unit=self.unit,
            count=terms.num_sequences,
            metrics=objective_metrics(terms, clipped.low, clipped.high),
        )
