"""Soft Adaptive Policy Optimization: a smooth gate in place of the clip. arXiv 2511.20347."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.base import check_terms
from gspo.objectives.metrics import objective_metrics
from gspo.objectives.ratios import attach_gradient, bounded_exp
from gspo.types import ObjectiveOutput, Unit


@dataclass(frozen=True)
class SAPO:
    """``J = mean_i mean_t f(w_it) A_i`` with ``f(w) = sigmoid(tau (w - 1)) * 4 / tau``; loss = -J.

    ``w_it = pi_it / old_it``; tau is tau_positive where A_i > 0 and tau_negative where A_i < 0. The gradient of a
    token is ``4 p (1 - p) w A grad log pi`` with ``p = sigmoid(tau (w - 1))``: that of policy gradient at w = 1, and
    fading on both sides. The larger tau, the sooner. The log ratio of a token is bounded at 10 where it is
    exponentiated.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    name: ClassVar[str] = "sapo"
    unit: ClassVar[Unit] = "sequence"

    def __post_init__(self) -> None:
        for key, value in (("tau_positive", self.tau_positive), ("tau_negative", self.tau_negative)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{key} = {value} is not a temperature; it must be above 0 and finite")

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``. ``loss_sum`` is over sequences; nothing is cut, the clip fractions are 0."""
        terms = check_terms(logprobs, old_logprobs, advantages, response_mask)
        tau = torch.where(terms.advantages > 0, self.tau_positive, self.tau_negative).to(terms.logprobs.dtype)
        ratio = attach_gradient(bounded_exp(terms.token_log_ratio), terms.logprobs)
        gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
        never = torch.zeros_like(terms.mask)
        return ObjectiveOutput(
            loss_sum=-terms.per_sequence(gate * terms.advantages).sum(),
            unit=self.unit,
            count=terms.num_sequences,
            metrics=objective_metrics(terms, never, never),
        )
