"""From the name in a recipe to the objective."""

from __future__ import annotations

from typing import cast

from gspo.errors import ConfigError
from gspo.objectives.base import Objective
from gspo.objectives.bundle import PAPER_BOUNDS, bundle_findings
from gspo.objectives.grpo import GRPO
from gspo.objectives.gspo import GSPO, GSPOToken
from gspo.objectives.pg import PolicyGradient
from gspo.objectives.ppo import PPO
from gspo.types import Unit


def make_objective(
    name: str, clip_low: float | None = None, clip_high: float | None = None, unit: str | None = None
) -> Objective:
    """The objective of that name; bounds that are None are the paper's.

    >>> make_objective("gspo")
    GSPO(clip_low=0.0003, clip_high=0.0004)

    Raises:
        ConfigError: an unknown name, a unit or bound that the objective does not have.
    """
    # What is only suspicious (a schedule, a wide band) was said when the recipe was checked.
    errors = [
        text for severity, text in bundle_findings(name, clip_low, clip_high, unit, 4, "auto") if severity == "error"
    ]
    if errors:
        raise ConfigError("; ".join(errors))
    paper = PAPER_BOUNDS[name]
    if paper is None:
        return PolicyGradient()
    low = paper[0] if clip_low is None else clip_low
    high = paper[1] if clip_high is None else clip_high
    if name == "grpo":
        return GRPO(low, high, cast(Unit, unit or "sequence"))
    if name == "ppo":
        return PPO(low, high)
    return GSPO(low, high) if name == "gspo" else GSPOToken(low, high)
