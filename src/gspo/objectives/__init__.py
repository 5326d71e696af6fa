"""Pure maths: objectives that turn log-probs and advantages into one sum, and what they are made of.

Names are loaded when asked for, so that ``gspo.objectives.bundle`` can be used without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.objectives.base import Objective
    from gspo.objectives.bundle import PAPER_BOUNDS, bundle_findings
    from gspo.objectives.cispo import CISPO
    from gspo.objectives.correction import Correction
    from gspo.objectives.dapo import DAPO
    from gspo.objectives.dr_grpo import DrGRPO
    from gspo.objectives.fspo import FSPO
    from gspo.objectives.gmpo import GMPO
    from gspo.objectives.grpo import GRPO
    from gspo.objectives.gspo import GSPO, GSPOToken
    from gspo.objectives.kl import KLPenalty
    from gspo.objectives.luspo import LUSPO
    from gspo.objectives.minirl import MiniRL
    from gspo.objectives.pg import PolicyGradient
    from gspo.objectives.ppo import PPO
    from gspo.objectives.registry import make_objective
    from gspo.objectives.sapo import SAPO

_HOME = {
    "CISPO": "cispo",
    "DAPO": "dapo",
    "DrGRPO": "dr_grpo",
    "FSPO": "fspo",
    "GMPO": "gmpo",
    "LUSPO": "luspo",
    "MiniRL": "minirl",
    "SAPO": "sapo",
    "Correction": "correction",
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
    "CISPO",
    "DAPO",
    "FSPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "LUSPO",
    "PAPER_BOUNDS",
    "PPO",
    "SAPO",
    "Correction",
    "DrGRPO",
    "GSPOToken",
    "KLPenalty",
    "MiniRL",
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
