"""``gspo check``: what a recipe comes to, before anything is loaded or run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from gspo.config import Recipe, check_recipe, estimate_memory, load_recipe, plan_recipe, recipe_text
from gspo.config.check import num_prompts
from gspo.config.memory import ASSUMED_PROMPT_TOKENS, readable
from gspo.config.model_files import model_findings, recipe_sizes
from gspo.objectives.bundle import PAPER_BOUNDS


def check(path: Path, overrides: Sequence[str]) -> int:
    """Prints the resolved recipe, batch, schedule, memory and warnings. Raises ConfigError if the recipe is wrong."""
    recipe = load_recipe(path, overrides, "check", inspect=True)
    print(f"# {path}, resolved; comments are defaults\n\n{recipe_text(recipe)}")
    trains = recipe.data.path is not None or recipe.data.task is not None
    if trains:
        print_block("batch", batch_lines(recipe))
        print_block("schedule", schedule_lines(recipe))
    if recipe.sft is not None:
        print_block("cold start", sft_lines(recipe))
    print_block("memory, an estimate for one process", memory_lines(recipe))
    findings = [*check_recipe(recipe, "check"), *model_findings(recipe)]
    warnings = [f"warning: {finding.sentence}" for finding in findings]
    print_block("warnings", warnings or ["none"])
    return 0


def print_block(title: str, lines: Sequence[str] | Iterator[str]) -> None:
    """A title and indented lines."""
    print("\n".join([f"# {title}", *(f"  {line}" for line in lines), ""]))


def count_prompts(recipe: Recipe) -> int | None:
    """Prompts of [data]: as the recipe says, or the lines of a JSONL file; None where only loading would tell."""
    known = num_prompts(recipe)
    path = Path(recipe.data.path or "")
    if known is not None or path.suffix != ".jsonl" or not path.is_file():
        return known
    with path.open("rb") as stream:
        return sum(1 for line in stream if line.strip())


def batch_lines(recipe: Recipe) -> Iterator[str]:
    """The arithmetic of one step."""
    plan = plan_recipe(recipe, count_prompts(recipe))
    rollout, sizes = recipe.rollout, plan.sequences_per_update
    prompts, group_size = counted(rollout.prompts_per_step, "prompt"), rollout.group_size
    yield f"{prompts} x {group_size} responses = {plan.num_sequences} sequences per step"
    size = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[-1]} or {sizes[0]}"
    yield f"{counted(len(sizes), 'update')} per step of {size} sequences"
    if plan.num_micro_batches is None:
        yield f"micro-batches of at most {recipe.train.micro_batch_tokens:,} tokens"
    else:
        yield f"{counted(plan.num_micro_batches, 'micro-batch', 'micro-batches')} per update"
    if plan.steps_per_epoch is not None and not plan.leftover_prompts:
        yield f"{counted(plan.steps_per_epoch, 'step')} per epoch"
    yield from plan.notes


def schedule_lines(recipe: Recipe) -> Iterator[str]:
    """How long the run is, and where the clip bounds come from."""
    train, objective = recipe.train, recipe.objective
    steps, updates = counted(train.num_steps, "step"), train.num_steps * train.num_mini_batches
    upper = " at most: steps without signal leave updates out" if train.groups_without_signal != "keep" else ""
    yield f"{steps} x {counted(train.num_mini_batches, 'update')} = {counted(updates, 'update')}{upper}"
    bounds = PAPER_BOUNDS[objective.name]
    if bounds is None:
        yield f"{objective.name} does not clip"
    elif objective.clip == "calibrated":
        yield (
            f"bounds frozen after {counted(objective.calibration_steps, 'step')}, "
            f"so that {objective.clip_target:.0%} of responses are clipped"
        )
    else:
        low, high = (objective.clip_low, objective.clip_high) if objective.clip == "explicit" else bounds
        yield f"{_band(objective.name, low, high)} ({objective.clip})"
    yield f"{train.num_steps * recipe.rollout.prompts_per_step * recipe.rollout.group_size:,} responses sampled"


def _band(name: str, low: float | None, high: float | None) -> str:
    """What the bounds keep inside, in words."""
    if name == "gmpo":
        return f"log ratio of a token kept in -{low:g} .. {high:g}"
    if name == "cispo":
        return f"weight of a token at most 1 + {high:g}"
    root = " to the power 1 / sqrt(tokens)" if name == "fspo" else ""
    return f"ratio kept in 1 - {low:g} .. 1 + {high:g}{root}"


def sft_lines(recipe: Recipe) -> Iterator[str]:
    """How long the cold start is."""
    if recipe.sft is None:
        return
    end = "" if recipe.sft.stop_at_pass is None else f", fewer once pass@1 reaches {recipe.sft.stop_at_pass:g}"
    yield f"{counted(recipe.sft.num_steps, 'update')} of {recipe.sft.batch_size} pairs{end}"


def memory_lines(recipe: Recipe) -> Iterator[str]:
    """The estimate part by part, or why there is none."""
    sizes = recipe_sizes(recipe)
    if sizes is None:
        yield f'not known: "{recipe.model.path}" is not on this disk; its sizes are known once it is downloaded'
        return
    if sizes.num_parameters is None:
        yield f"not known: no safetensors file in {recipe.model.path} tells the number of parameters"
        return
    parts = estimate_memory(recipe, **asdict(sizes))
    yield f"{sizes.num_parameters:,} parameters"
    for name, size in parts.items():
        yield f"{name:<12}{readable(size):>12}"
    if recipe.data.max_prompt_tokens is None:
        yield f"prompts are taken to have {ASSUMED_PROMPT_TOKENS} tokens, as data.max_prompt_tokens is not set"
    yield "peak leaves out what torch itself and fragmentation take"


def counted(count: int, one: str, several: str | None = None) -> str:
    """ "1 step", "2 steps"."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"
