"""Group Sequence Policy Optimization, arXiv 2507.18071v2, equations (5)-(7) and (13)-(17)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gspo.objectives.base import Terms, check_terms, require_one_advantage_per_row
from gspo.objectives.clipping import Clipped, check_bounds, clipped_surrogate
from gspo.objectives.metrics import objective_metrics
from gspo.objectives.ratios import mean_log_ratio
from gspo.types import ObjectiveOutput, Unit


@dataclass(frozen=True)
class GSPOToken:
    """GSPO with an advantage per token, equations (13)-(17).

    ``J = mean_i mean_t min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)`` with
    ``s_it = sg[s_i] * pi_it / sg[pi_it]`` and ``log s_i = mean_t (log pi_it - log old_it)``; loss = -J.
    s_it has the value of the sequence ratio and the gradient of its own token. s_i is detached, so a sequence that is
    spread over several calls only needs its (sum of log ratios, length).

    log s_i is bounded at 10 where it is exponentiated: the weight of a response is at most e^10 = 22026 and its
    gradient keeps its direction.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    name: ClassVar[str] = "gspo_token"
    unit: ClassVar[Unit] = "sequence"

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high)

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``. ``loss_sum`` is over sequences, each with weight 1 whatever its length."""
        terms = self._terms(logprobs, old_logprobs, advantages, response_mask)
        clipped = self._clipped(terms)
        return ObjectiveOutput(
            loss_sum=-terms.per_sequence(clipped.surrogate).sum(),
            unit=self.unit,
            count=terms.num_sequences,
            metrics=objective_metrics(terms, clipped.low, clipped.high),
        )

    @torch.no_grad()
    def clipped_rows(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        """(N,) bool: rows whose every response token is cut, so that their gradient is exactly 0.

        With one advantage per response these are the responses that the min clips. Rows without tokens are False.
        """
        terms = self._terms(logprobs, old_logprobs, advantages, response_mask)
        cut = self._clipped(terms).cut
        return (cut | ~terms.mask).all(dim=-1) & (terms.lengths > 0)

    def _terms(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Terms:
        return check_terms(logprobs, old_logprobs, advantages, response_mask)

    def _clipped(self, terms: Terms) -> Clipped:
        log_s = mean_log_ratio(terms.token_log_ratio, terms.mask)
        return clipped_surrogate(terms, log_s[:, None], self.clip_low, self.clip_high)


@dataclass(frozen=True)
class GSPO(GSPOToken):
    """GSPO, equations (5)-(7): one ratio, one advantage and one clip per response.

    ``J = mean_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)``; loss = -J. Where a response is not clipped
    the gradient is ``s_i A_i / |y_i| * sum_t grad log pi_it``; a clipped response loses all of its tokens.

    Computed through the GSPO-token form, which has the same value, clip and gradient when the tokens of a response
    share their advantage. (N, T) advantages are accepted on that condition only.
    """

    name: ClassVar[str] = "gspo"

    def _terms(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Terms:
        terms = check_terms(logprobs, old_logprobs, advantages, response_mask)
        if advantages.dim() == 2:
            require_one_advantage_per_row(terms)
        return terms
