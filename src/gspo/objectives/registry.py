"""From the name in a recipe to the objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, cast

from gspo.errors import ConfigError
from gspo.objectives.base import Objective
from gspo.objectives.bundle import ONE_ADVANTAGE, PAPER_BOUNDS, bundle_findings
from gspo.objectives.cispo import CISPO
from gspo.objectives.dapo import DAPO
from gspo.objectives.dr_grpo import DrGRPO
from gspo.objectives.fspo import FSPO
from gspo.objectives.gmpo import GMPO
from gspo.objectives.grpo import GRPO
from gspo.objectives.gspo import GSPO, GSPOToken
from gspo.objectives.luspo import LUSPO
from gspo.objectives.minirl import MiniRL
from gspo.objectives.pg import PolicyGradient
from gspo.objectives.ppo import PPO
from gspo.objectives.sapo import SAPO
from gspo.types import Unit

#: Objectives that are made of two bounds and nothing else.
_BANDED: Final[Mapping[str, Callable[[float, float], Objective]]] = MappingProxyType(
    {
        "gspo": GSPO,
        "gspo_token": GSPOToken,
        "ppo": PPO,
        "dapo": DAPO,
        "cispo": CISPO,
        "gmpo": GMPO,
        "luspo": LUSPO,
        "fspo": FSPO,
        "minirl": MiniRL,
    }
)


def make_objective(
    name: str,
    clip_low: float | None = None,
    clip_high: float | None = None,
    unit: str | None = None,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    length_divisor: float | None = None,
    weighs_tokens: bool = False,
) -> Objective:
    """The objective of that name; bounds that are None are the paper's.

    Args:
        tau_positive, tau_negative: temperatures of sapo.
        length_divisor: constant that dr_grpo divides a response by, in tokens.
        weighs_tokens: the advantages will be (N, T), since a correction weighs them token by token.

    >>> make_objective("gspo")
    GSPO(clip_low=0.0003, clip_high=0.0004)

    Raises:
        ConfigError: an unknown name, a unit or bound that the objective does not have.
    """
    # What is only suspicious (a schedule, a wide band) was said when the recipe was checked.
    errors = [
        text for severity, text in bundle_findings(name, clip_low, clip_high, unit, 4, "auto") if severity == "error"
    ]
    if weighs_tokens and name in ONE_ADVANTAGE:
        errors.append(f"{name} has one advantage per response; a correction by token cannot be used with it")
    if name == "dr_grpo" and length_divisor is None:
        errors.append("dr_grpo needs a length_divisor, the constant that every response is divided by")
    if errors:
        raise ConfigError("; ".join(errors))
    if name == "sapo":
        return SAPO(tau_positive, tau_negative)
    paper = PAPER_BOUNDS[name]
    if paper is None:
        return PolicyGradient()
    low = paper[0] if clip_low is None else clip_low
    high = paper[1] if clip_high is None else clip_high
    if name == "grpo":
        return GRPO(low, high, cast(Unit, unit or "sequence"))
    if name == "dr_grpo":
        return DrGRPO(cast(float, length_divisor), low, high)
    # With equal advantages GSPO-token is GSPO; only it takes weights by token.
    return _BANDED["gspo_token" if name == "gspo" and weighs_tokens else name](low, high)
