"""Plain policy gradient (REINFORCE, Williams 1992): the control without ratio and without clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gspo.objectives.base import check_terms
from gspo.objectives.metrics import objective_metrics
from gspo.types import ObjectiveOutput, Unit


@dataclass(frozen=True)
class PolicyGradient:
    """``J = mean_i A_i mean_t log pi_it``; loss = -J.

    The log-prob form: no ratio enters the loss, so off-policy data are taken as if they were on-policy. While pi = old
    its gradient is GSPO's and GRPO's; its value is not. ``old_logprobs`` is read for the metrics only.
    """

    name: ClassVar[str] = "pg"
    unit: ClassVar[Unit] = "sequence"

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``. ``loss_sum`` is over sequences; the clip fractions are 0."""
        terms = check_terms(logprobs, old_logprobs, advantages, response_mask)
        never = torch.zeros_like(terms.mask)
        return ObjectiveOutput(
            loss_sum=-terms.per_sequence(terms.advantages * terms.logprobs).sum(),
            unit=self.unit,
            count=terms.num_sequences,
            metrics=objective_metrics(terms, never, never),
        )
