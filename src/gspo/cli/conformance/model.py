"""A worked case, what is tested on it, and when two answers are the same."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gspo.advantages import Scale, constant_groups, group_advantages
from gspo.errors import InputError
from gspo.objectives.base import Objective
from gspo.objectives.grpo import GRPO
from gspo.objectives.gspo import GSPO, GSPOToken
from gspo.objectives.kl import Estimator, KLPenalty, k1, k2, k3
from gspo.objectives.ratios import selected_logprobs
from gspo.types import ObjectiveOutput

#: log-probs, old or reference log-probs, advantages, mask: an objective, or a penalty called like one.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], ObjectiveOutput]


def _kl_objective(estimator: str) -> Loss:
    return KLPenalty(1.0, cast(Estimator, estimator), "token")


def _kl_per_token(estimator: str, policy: Tensor, reference: Tensor) -> Tensor:
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](policy, reference)


def _group_advantages(rewards: Tensor | Sequence[float | None], ids: Sequence[Any], scale: str) -> Tensor:
    return group_advantages(rewards, ids, scale=cast(Scale, scale))


def _pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    from gspo.evals.passk import pass_at_k

    return pass_at_k(num_samples, num_correct, k)


@dataclass(frozen=True)
class Implementation:
    """What is tested; by default this package. A test puts a faulty part in its place."""

    gspo: Callable[[float, float], Objective] = GSPO
    gspo_token: Callable[[float, float], Objective] = GSPOToken
    sequence_mean: Callable[[], Objective] = GSPO
    token_mean: Callable[[], Objective] = lambda: GRPO(unit="token")
    kl_objective: Callable[[str], Loss] = _kl_objective
    kl_per_token: Callable[[str, Tensor, Tensor], Tensor] = _kl_per_token
    group_advantages: Callable[..., Tensor] = _group_advantages
    constant_groups: Callable[..., int] = constant_groups
    selected_logprobs: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = selected_logprobs
    pass_at_k: Callable[[int, int, int], float] = _pass_at_k


@dataclass(frozen=True)
class Case:
    """One worked case; ``input`` is complete, ``faults`` is flat."""

    id: str
    title: str
    input: Mapping[str, Any]
    expected: Mapping[str, Any]
    faults: Mapping[str, Any]
    tolerance: str

    def tolerance_in(self, dtype: torch.dtype) -> float:
        """Absolute. ``1e-6 absolute in float32, 1e-9 in float64`` unless the case says otherwise."""
        precision = "float32" if dtype == torch.float32 else "float64"
        stated = re.search(rf"(\d[\d.e+-]*)[^,;\d]*in {precision}", self.tolerance)
        number = stated or re.match(r"\s*(\d[\d.e+-]*)", self.tolerance)
        default = 1e-6 if dtype == torch.float32 else 1e-9
        # Expected numbers are written with nine decimals.
        return (float(number[1]) if number else default) + 6e-10


@dataclass(frozen=True)
class Check:
    """One answer against one expectation; ``right is None``: could not be read, not run."""

    field: str
    right: bool | None
    got: Any
    expected: Any
    dtype: torch.dtype


Handler = Callable[[Case, Implementation, torch.dtype], list[Check]]


@dataclass(frozen=True)
class Shape:
    """An input belongs to a shape by the keys that it has."""

    keys: frozenset[str]
    handler: Handler

    def fits(self, given: Mapping[str, Any]) -> bool:
        return self.keys <= given.keys()


def same_answer(got: Any, expected: Any, tolerance: float, exact_zero: bool = False) -> bool:
    """Whether numbers agree; one expected number stands for every entry of a list. Text is read for a number."""
    if isinstance(got, list | tuple):
        wanted = expected if isinstance(expected, list | tuple) else [expected] * len(got)
        return len(got) > 0 and len(got) == len(wanted) and all(
            same_answer(g, w, tolerance, exact_zero) for g, w in zip(got, wanted, strict=True)
        )  # fmt: skip
    if isinstance(got, str) or isinstance(expected, list | tuple):
        return False
    if isinstance(expected, str):
        if not math.isfinite(got):
            return ("nan" if math.isnan(got) else "inf") in re.split(r"[^a-z]+", expected.lower())
        number = re.match(r"\s*(-?\d+(\.\d+)?(e[+-]?\d+)?)\b", expected)
        return number is not None and abs(got - float(number[1])) <= tolerance
    if exact_zero and expected == 0:
        return got == 0
    return math.isfinite(got) and abs(got - expected) <= tolerance


def compare(
    case: Case, dtype: torch.dtype, answers: Mapping[str, Any], exact: str = "grad|dloss|padding"
) -> list[Check]:
    """Checks answers whose name (up to a colon) is expected; those that match ``exact`` must be 0 where 0 is due."""
    checks = []
    for label, got in answers.items():
        name = label.split(":")[0]
        if name in case.expected:
            wanted = case.expected[name]
            right = same_answer(got, wanted, case.tolerance_in(dtype), re.search(exact, name) is not None)
            checks.append(Check(label.replace(":", "/", 1), right, got, wanted, dtype))
    return checks


def refusal(label: str, call: Callable[[], float], dtype: torch.dtype) -> Check:
    """Right if the call refuses its input."""
    try:
        got: Any = call()
    except InputError as error:
        return Check(label, True, str(error), "refused", dtype)
    return Check(label, False, got, "refused", dtype)
