"""Pure maths: objectives that turn log-probs and advantages into one sum, and what they are made of.

Names are loaded when asked for, so that ``gspo.objectives.bundle`` can be used without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.objectives.base import Objective
    from gspo.objectives.bundle import PAPER_BOUNDS, bundle_findings
    from gspo.objectives.grpo import GRPO
    from gspo.objectives.gspo import GSPO, GSPOToken
    from gspo.objectives.kl import KLPenalty
    from gspo.objectives.pg import PolicyGradient
    from gspo.objectives.ppo import PPO
    from gspo.objectives.registry import make_objective

_HOME = {
    "GRPO": "grpo",
    "GSPO": "gspo",
    "PAPER_BOUNDS": "bundle",
    "PPO": "ppo",
    "GSPOToken": "gspo",
    "KLPenalty": "kl",
    "Objective": "base",
    "PolicyGradient": "pg",
    "bundle_findings": "bundle",
    "make_objective": "registry",
}

__all__ = [
    "GRPO",
    "GSPO",
    "PAPER_BOUNDS",
    "PPO",
    "GSPOToken",
    "KLPenalty",
    "Objective",
    "PolicyGradient",
    "bundle_findings",
    "make_objective",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
