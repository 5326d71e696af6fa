"""Estimators of KL(policy, reference) from samples of the policy, and a penalty made of one.

x = log reference - log policy at the sampled token (http://joschu.net/blog/kl-approx.html):
``k1 = -x`` is unbiased and may be negative, ``k2 = x**2 / 2`` is biased and small in variance, ``k3 = exp(x) - 1 - x``
is unbiased and never negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor

from gspo.errors import ConfigError
from gspo.objectives.base import check_terms
from gspo.types import ObjectiveOutput, Unit

Estimator = Literal["k1", "k2", "k3"]

#: Beyond this k3 goes on as its tangent: exp(10) = 22026 is already far outside any trust region, and in float32
#: exp(89) would be infinite.
K3_LINEAR_FROM: Final = 10.0


def k1(policy: Tensor, reference: Tensor) -> Tensor:
    """log policy - log reference, any shape. Its gradient, grad log policy, does not depend on the reference."""
    return policy - reference


def k2(policy: Tensor, reference: Tensor) -> Tensor:
    """(log policy - log reference)**2 / 2, any shape."""
    return 0.5 * (policy - reference).square()


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """exp(x) - 1 - x with x = log reference - log policy, any shape.

    From x = 10 on it is continued by its tangent: value and gradient stay continuous, finite (|gradient| <= e^10 - 1)
    and keep their sign, so a policy that has lost a token is still pulled back.
    """
    x = reference - policy
    bounded = x.clamp(max=K3_LINEAR_FROM)
    # relu, so that below the bound nothing large is added and taken away again, in value or gradient.
    excess = (x - K3_LINEAR_FROM).relu()
    return bounded.expm1() - bounded + excess * math.expm1(K3_LINEAR_FROM)


def k1_with_gradient(policy: Tensor, reference: Tensor) -> Tensor:
    """k1's value with the gradient that k1 has as a penalty in the reward, (log policy - log ref) grad log policy.

    That is k2's gradient. k1's own has mean 0 under the policy and would penalise nothing.
    """
    difference = k1(policy, reference).detach()
    return difference + difference * (policy - policy.detach())


_ESTIMATORS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = MappingProxyType(
    {"k1": k1_with_gradient, "k2": k2, "k3": k3}
)


@dataclass(frozen=True)
class KLPenalty:
    """``coefficient * mean KL(policy, reference)``, called like an objective with the reference in the place of old.

    Give it the unit of the objective that it is added to: then both sums have one denominator. unit "token" is the mean
    over all tokens, "sequence" the mean inside a response, then over responses.
    """

    coefficient: float = 1.0
    estimator: Estimator = "k3"
    unit: Unit = "token"

    def __post_init__(self) -> None:
        if self.estimator not in _ESTIMATORS:
            raise ConfigError(f"there is no KL estimator {self.estimator!r}; it is one of {', '.join(_ESTIMATORS)}")
        if not (math.isfinite(self.coefficient) and self.coefficient >= 0):
            raise ConfigError(f"the KL coefficient is {self.coefficient}; it must be 0 or more and finite")

    @property
    def name(self) -> str:
        return f"kl_{self.estimator}"

    def __call__(
        self, logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> ObjectiveOutput:
        """See ``Objective.__call__``; the advantages are not used.

        Metrics: ``kl/reference``, the estimator over tokens without the coefficient.
        """
        unused = torch.zeros(len(logprobs), device=logprobs.device)
        terms = check_terms(logprobs, ref_logprobs, unused, response_mask)
        per_token = _ESTIMATORS[self.estimator](terms.logprobs, terms.old_logprobs)
        per_unit = terms.per_sequence(per_token) if self.unit == "sequence" else per_token
        total = float(per_token.detach().sum(dtype=torch.float64))
        return ObjectiveOutput(
            loss_sum=self.coefficient * per_unit.sum(),
            unit=self.unit,
            count=terms.count(self.unit),
            metrics={"kl/reference": (total, terms.num_tokens)},
        )
