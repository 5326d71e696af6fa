"""What the recipe says about the loop and the loss, in their own words: bounds, objective, correction, calibration.

Pure functions of the recipe; nothing is loaded here.
"""

from __future__ import annotations

import math

from gspo.config.schema import Recipe
from gspo.launch.attempts import History
from gspo.objectives import make_objective
from gspo.objectives.base import Objective
from gspo.objectives.bundle import PAPER_BOUNDS
from gspo.objectives.correction import Correction
from gspo.train.bounds import Bounds, Calibration
from gspo.train.loop import LoopSettings
from gspo.train.step import MicroBatching

#: How often the responses of a call fill the engine's slots: its end, when few are left, is short beside that.
_FILLED = 4


def settings_of(recipe: Recipe, history: History | None = None) -> LoopSettings:
    """history: how often the run went back, and what that changed."""
    history = history or History()
    trainer = recipe.train
    low = min(first_bounds(recipe).clip_low or (PAPER_BOUNDS[recipe.objective.name] or (1e-3,))[0], 0.2)
    return LoopSettings(
        seed=history.seed(recipe),
        num_steps=trainer.num_steps,
        prompts_per_step=recipe.rollout.prompts_per_step,
        num_mini_batches=history.num_mini_batches(recipe),
        cut=MicroBatching(trainer.micro_batch_size, trainer.micro_batch_tokens),
        temperature=recipe.rollout.temperature,
        old_logprobs=trainer.old_logprobs,
        mismatch_bound=trainer.mismatch_bound or low / 10,
        groups_without_signal=trainer.groups_without_signal,
        max_refills=trainer.max_refills,
        random_drop=trainer.random_drop,
        truncated=trainer.truncated,
        advantage_scale=recipe.advantage.scale,
        std_floor=recipe.advantage.std_floor,
        eval_every=recipe.eval.every,
        checkpoint_every=recipe.checkpoint.every,
        num_logged_samples=trainer.num_logged_samples,
        answer_column=recipe.reward.answer_column,
        non_finite=recipe.guard.non_finite,
        max_non_finite=recipe.guard.max_non_finite,
        reaction=recipe.guard.reaction,
        reactions=recipe.guard.reactions,
        max_go_backs=recipe.guard.go_back.max_times,
    )


def prompts_per_call(recipe: Recipe) -> int:
    """Most prompts in one call of the engine; if the recipe does not say, what fills its slots four times."""
    rollout = recipe.rollout
    return rollout.prompts_per_call or math.ceil(_FILLED * rollout.max_slots / rollout.group_size)


def first_bounds(recipe: Recipe) -> Bounds:
    """Explicit ones, the paper's, or none yet: calibration finds them in the first steps."""
    objective = recipe.objective
    paper = PAPER_BOUNDS[objective.name]
    if paper is None or objective.clip == "calibrated":
        return Bounds(None, None)
    if objective.clip == "explicit":
        return Bounds(objective.clip_low, objective.clip_high)
    return Bounds(*paper)


def objective_of(recipe: Recipe, bounds: Bounds) -> Objective:
    settings, correction = recipe.objective, correction_of(recipe)
    return make_objective(
        settings.name,
        bounds.clip_low,
        bounds.clip_high,
        settings.unit,
        tau_positive=settings.tau_positive,
        tau_negative=settings.tau_negative,
        length_divisor=settings.length_divisor or recipe.rollout.max_new_tokens,
        weighs_tokens=correction is not None and correction.by_token,
    )


def correction_of(recipe: Recipe) -> Correction | None:
    settings = recipe.objective.correction
    return None if settings.kind == "none" else Correction(settings.kind, settings.low, settings.high)


def calibration_of(recipe: Recipe) -> Calibration | None:
    if recipe.objective.clip != "calibrated":
        return None
    return Calibration(
        recipe.objective.clip_target, recipe.objective.calibration_steps, first_update=recipe.train.warmup_steps
    )
