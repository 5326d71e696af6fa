"""What is wrong with the [guard] of a recipe: detectors that do not exist, and nothing to go back to."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import get_args

from gspo.config.batch import plan_batch
from gspo.config.effects import clips, goes_back
from gspo.config.findings import Finding
from gspo.config.schema import Reaction, Recipe
from gspo.config.source import toml_value
from gspo.errors import ConfigError
from gspo.train.guard import BY_NAME


def guard_findings(recipe: Recipe) -> Iterator[Finding]:
    """Faults of the reactions to detectors, and of what is changed when a run goes back."""
    yield from _reaction_findings(recipe)
    if goes_back(recipe):
        yield from _go_back_findings(recipe)


def _reaction_findings(recipe: Recipe) -> Iterator[Finding]:
    known = get_args(Reaction)
    for name, reaction in recipe.guard.reactions.items():
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, n=1)
            meant = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(BY_NAME)}"
            yield Finding("error", "guard.reactions", f'there is no detector "{name}"; {meant}')
        elif reaction not in known:
            words = ", ".join(f'"{word}"' for word in known)
            yield Finding("error", "guard.reactions", f"{name} = {toml_value(reaction)} must be one of {words}")


def _go_back_findings(recipe: Recipe) -> Iterator[Finding]:
    change, related = recipe.guard.go_back, ("guard.reaction", "guard.reactions")
    if not recipe.checkpoint.every:
        text = 'there is nothing to go back to with 0, and a reaction of [guard] is "go_back"; set it to 1 or more'
        yield Finding("error", "checkpoint.every", text, related)
    one_sided = recipe.objective.name == "cispo"
    if (change.clip_low is None) != (change.clip_high is None) and clips(recipe) and not one_sided:
        missing = "clip_low" if change.clip_low is None else "clip_high"
        yield Finding("error", f"guard.go_back.{missing}", "is needed too: bounds come in pairs", related)
    if change.num_mini_batches is not None:
        try:
            plan_batch(recipe.rollout.prompts_per_step, recipe.rollout.group_size, change.num_mini_batches)
        except ConfigError as error:
            yield Finding("error", "guard.go_back.num_mini_batches", str(error), ("rollout.prompts_per_step",))
