"""Reinforcement-learning post-training at the level of whole answers (GSPO, arXiv 2507.18071).

The public names below are loaded when they are first used, so that ``import gspo`` costs nothing::

    from gspo import GSPO, group_advantages

    advantages = group_advantages(rewards, group_ids)
    out = GSPO(clip_low=3e-4, clip_high=4e-4)(logprobs, old_logprobs, advantages, response_mask)
    (out.loss_sum / out.count).backward()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.advantages import group_advantages
    from gspo.config import Recipe, check_recipe, load_recipe, plan_batch
    from gspo.errors import GspoError, InputError
    from gspo.objectives import GRPO, GSPO, PPO, GSPOToken, PolicyGradient, make_objective
    from gspo.types import ObjectiveOutput

    __version__: str

_HOME = {
    "GRPO": "objectives",
    "GSPO": "objectives",
    "GSPOToken": "objectives",
    "GspoError": "errors",
    "InputError": "errors",
    "ObjectiveOutput": "types",
    "PPO": "objectives",
    "PolicyGradient": "objectives",
    "Recipe": "config",
    "check_recipe": "config",
    "group_advantages": "advantages",
    "load_recipe": "config",
    "make_objective": "objectives",
    "plan_batch": "config",
}

__all__ = [
    "GRPO",
    "GSPO",
    "PPO",
    "GSPOToken",
    "GspoError",
    "InputError",
    "ObjectiveOutput",
    "PolicyGradient",
    "Recipe",
    "__version__",
    "check_recipe",
    "group_advantages",
    "load_recipe",
    "make_objective",
    "plan_batch",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gspo")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
