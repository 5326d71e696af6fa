"""Rules that span keys: what contradicts, what has no effect, and what will probably not do what was meant.

Pure Python over the validated tree: no torch, no file is opened except to see whether it is there.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gspo.config.batch import DEFAULT_TASK_PROMPTS, BatchPlan, plan_batch
from gspo.config.effects import CLIPS, clips, is_set, useless, useless_keys, value_of
from gspo.config.findings import Command, Finding
from gspo.config.guard import guard_findings
from gspo.config.model_files import path_findings
from gspo.config.schema import Recipe, RewardFunction
from gspo.config.source import toml_value
from gspo.errors import ConfigError
from gspo.objectives.bundle import SEQUENCE_RATIO, TOKEN_RATIO, bundle_findings, correction_findings

__all__ = ["BatchPlan", "Finding", "check_files", "check_recipe", "num_prompts", "plan_batch", "plan_recipe"]

BUILT_IN_REWARDS: Final = ("exact_match", "number", "math", "code", "task", "overlong")
#: Below this learning rate most AdamW steps are smaller than half the spacing of a 16-bit weight of usual size.
_VANISHING_LEARNING_RATE: Final = 1e-4
_DEVICE: Final = re.compile(r"(auto|cpu|(cuda|mps|xpu)(:\d+)?)")


def check_recipe(recipe: Recipe, command: Command = "train") -> list[Finding]:
    """Everything that is wrong or doubtful about a recipe beyond single values, errors first.

    Args:
        recipe: a validated tree; ``model_fields_set`` says what the user wrote.
        command: what it is for; ``sft`` (and ``check`` where there is [sft]) needs no source in [data].
    """
    needs_data = _needs_data(recipe, command)
    findings = [
        *_command_findings(recipe, command),
        *_model_findings(recipe),
        *_source_findings(recipe, command, needs_data),
        *useless_keys(recipe),
        *_reward_findings(recipe, needs_data),
        *_objective_findings(recipe),
        *_moe_findings(recipe),
        *_batch_findings(recipe),
        *_schedule_findings(recipe),
        *guard_findings(recipe),
        *_eval_findings(recipe),
        *_held_out_findings(recipe, command),
    ]
    concerns = [finding for finding in findings if finding.severity == "error" or _is_used(finding, recipe, command)]
    return sorted(concerns, key=lambda finding: finding.severity != "error")


def _is_used(finding: Finding, recipe: Recipe, command: Command) -> bool:
    """Whether a warning is about what the command does: an evaluation does not care for the training schedule."""
    if command in ("train", "check"):
        return True
    used = {"run", "model", "data"} | ({"sft"} if command == "sft" else set())
    if command == "eval" or (recipe.sft is not None and recipe.sft.stop_at_pass is not None):
        used |= {"rollout", "reward", "eval"}
    return {key.partition(".")[0] for key in (finding.key, *finding.related)} <= used


def _needs_data(recipe: Recipe, command: Command) -> bool:
    if command not in ("sft", "check") or recipe.sft is None:
        return True
    return recipe.sft.stop_at_pass is not None


def has_held_out(recipe: Recipe) -> bool:
    """Whether there are prompts to evaluate on: a task makes its own, a file does not."""
    return recipe.data.eval is not None or recipe.data.task is not None


def num_prompts(recipe: Recipe) -> int | None:
    """Prompts of [data] as far as the recipe alone tells."""
    return recipe.data.num_prompts or (DEFAULT_TASK_PROMPTS if recipe.data.task else None)


def plan_recipe(recipe: Recipe, num_prompts: int | None = None) -> BatchPlan:
    """The batch arithmetic of a recipe for one process. Raises ConfigError as ``plan_batch`` does."""
    return plan_batch(
        prompts_per_step=recipe.rollout.prompts_per_step,
        group_size=recipe.rollout.group_size,
        num_mini_batches=recipe.train.num_mini_batches,
        micro_batch_size=recipe.train.micro_batch_size,
        num_prompts=num_prompts,
    )


# Sections.


def _command_findings(recipe: Recipe, command: Command) -> Iterator[Finding]:
    if command == "sft" and recipe.sft is None:
        yield Finding("error", "sft", "the recipe has no [sft] section; add one with path or task")
    if not _DEVICE.fullmatch(recipe.run.device):
        yield Finding(
            "error", "run.device", f'"{recipe.run.device}" is not a device; "auto", "cpu", "cuda" and "cuda:1" are'
        )


def _one_of_two(recipe: Recipe, first: str, second: str, what: str) -> Iterator[Finding]:
    """Exactly one of two keys; the fault is reported at the one that is there."""
    have = [key for key in (first, second) if value_of(recipe, key) is not None]
    related = (first, second)
    if len(have) == 2:
        yield Finding("error", second, f"{first} and {second} are both set; keep one of the two", related)
    elif not have:
        yield Finding("error", first, f"neither {first} nor {second} is set; {what}", related)


def _model_findings(recipe: Recipe) -> Iterator[Finding]:
    model = recipe.model
    yield from _one_of_two(recipe, "model.path", "model.tiny", 'give a model directory, or tiny = "qwen3"')
    if model.trust_remote_code and model.path is not None:
        yield Finding("warning", "model.trust_remote_code", "Python code shipped with the weights will be run")
    rate = recipe.train.learning_rate
    if model.dtype != "float32" and rate < _VANISHING_LEARNING_RATE:
        yield Finding(
            "warning",
            "model.dtype",
            f"weights in {model.dtype} round most updates of train.learning_rate = {rate:g} away; "
            'take dtype = "float32"',
            ("train.learning_rate",),
        )


def _source_findings(recipe: Recipe, command: Command, needs_data: bool) -> Iterator[Finding]:
    what = 'give a file, or task = "arithmetic:addition"'
    if needs_data or (recipe.data.path is not None and recipe.data.task is not None):
        yield from _one_of_two(recipe, "data.path", "data.task", what)
    elif command == "check" and recipe.data.path is None and recipe.data.task is None:
        text = "neither data.path nor data.task is set: the recipe is good for gspo sft only"
        yield Finding("warning", "data.path", text, ("data.task",))
    if recipe.data.eval is not None:
        yield from _one_of_two(recipe, "data.eval.path", "data.eval.task", what)
    if recipe.sft is not None:
        yield from _one_of_two(recipe, "sft.path", "sft.task", what)
    for key in ("data.task", "data.eval.task", "sft.task"):
        section = key.rpartition(".")[0]
        task = None if section == "sft" and recipe.sft is None else _task(recipe, section)
        if task is not None and not re.fullmatch(r"[a-z_]+:\S+", task):
            yield Finding(
                "error", key, f'"{task}" is not a task; write "arithmetic:addition" or "reasoning_gym:chain_sum"'
            )
    if recipe.rollout.engine == "scripted" and recipe.rollout.script is None:
        yield Finding(
            "error",
            "rollout.engine",
            '"scripted" replays a file of completions; set rollout.script, or take engine = "embedded"',
            ("rollout.script",),
        )


def _task(recipe: Recipe, section: str) -> str | None:
    node = {"data": recipe.data, "data.eval": recipe.data.eval, "sft": recipe.sft}[section]
    return None if node is None else node.task


def _reward_findings(recipe: Recipe, needs_data: bool) -> Iterator[Finding]:
    functions = recipe.reward.functions
    source = ("data.path", "data.task", "reward.functions")
    if not functions and needs_data and recipe.data.task is None and recipe.data.path is not None:
        yield Finding(
            "error",
            "reward.functions",
            "data of a file needs a reward; add [[reward.functions]] with "
            'name = "exact_match", "number", "math", "code" or "module:function"',
            source,
        )
    for index, function in enumerate(functions):
        yield from _function_findings(recipe, f"reward.functions[{index}]", function)
    names = [function.name for function in functions]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Finding("error", "reward.functions", f'"{name}" is there {names.count(name)} times; name it once')
    if functions and not any(function.weight for function in functions):
        yield Finding("error", "reward.functions", "every weight is 0, so every reward is 0; give one a weight of 1")
    if functions and not recipe.reward.isolate and not any(name in BUILT_IN_REWARDS for name in names):
        for key in ("reward.timeout_s", "reward.num_workers"):
            if is_set(recipe, key):
                yield useless(recipe, key, "without a built-in verifier or reward.isolate", "reward.functions")
    if all(name in BUILT_IN_REWARDS for name in names) and is_set(recipe, "reward.isolate"):
        yield useless(recipe, "reward.isolate", "without a module:function in reward.functions", "reward.functions")
    if is_set(recipe, "reward.answer_column") and all(name == "task" for name in names) and recipe.data.task:
        yield useless(recipe, "reward.answer_column", 'where the only reward is "task"', *source)


def _function_findings(recipe: Recipe, key: str, function: RewardFunction) -> Iterator[Finding]:
    name = function.name
    if name in BUILT_IN_REWARDS:
        if "kind" in function.model_fields_set:
            text = f'"{function.kind}" has no effect with the built-in "{name}"; it is for a module:function'
            yield Finding("error", f"{key}.kind", text, (f"{key}.name",))
        if name == "task" and recipe.data.path is not None:
            text = '"task" is the verifier of a generated task, and data.path is a file; take "exact_match" or "number"'
            yield Finding("error", f"{key}.name", text, ("data.path", "data.task"))
    elif not re.fullmatch(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_][\w.]*", name):
        near = difflib.get_close_matches(name, BUILT_IN_REWARDS, n=1)
        built_in = ", ".join(f'"{known}"' for known in BUILT_IN_REWARDS)
        meant = f'did you mean "{near[0]}"?' if near else f'write {built_in} or "module:function"'
        yield Finding("error", f"{key}.name", f'"{name}" is not a reward; {meant}')


def _objective_findings(recipe: Recipe) -> Iterator[Finding]:
    objective = recipe.objective
    related = ("objective.name", "objective.clip", *CLIPS, "objective.unit", "train.num_mini_batches")
    explicit = objective.clip == "explicit" and clips(recipe)
    if explicit:
        for key in CLIPS:
            one_sided = objective.name == "cispo" and key == "objective.clip_low"
            if value_of(recipe, key) is None and not one_sided:
                yield Finding("error", key, 'is needed with objective.clip = "explicit"', related)
    low, high = (objective.clip_low, objective.clip_high) if explicit else (None, None)
    for severity, message in bundle_findings(
        objective.name, low, high, objective.unit, recipe.train.num_mini_batches, recipe.train.old_logprobs
    ):
        key = _bundle_key(message)
        yield Finding(severity, key, message.removeprefix(f"{key.rpartition('.')[2]} = "), related)
    correction = objective.correction
    for severity, message in correction_findings(
        objective.name, correction.kind, correction.low, correction.high, recipe.train.old_logprobs
    ):
        keys = ("objective.name", "objective.correction", "train.old_logprobs")
        yield Finding(severity, "objective.correction.kind", message, keys)
    if objective.clip == "calibrated":
        yield from _calibration_findings(recipe)
    if objective.name in ("dr_grpo", "minirl") and recipe.advantage.scale in ("group_std", "batch_std"):
        yield Finding(
            "warning",
            "objective.name",
            f"{objective.name} has advantages that are not divided by a standard deviation; "
            'set advantage.scale = "none"',
            ("advantage.scale",),
        )
    if objective.name == "ppo":
        yield Finding(
            "warning", "objective.name", "ppo trains no critic here: every token gets its response's group advantage"
        )


def _moe_findings(recipe: Recipe) -> Iterator[Finding]:
    replay = recipe.moe.replay
    if (
        recipe.moe.load_balancing_coefficient
        and recipe.rollout.engine == "scripted"
        and recipe.train.old_logprobs != "recompute"
    ):
        text = 'counts the experts of every response, and a script has none; set train.old_logprobs = "recompute"'
        yield Finding(
            "error", "moe.load_balancing_coefficient", text, ("rollout.engine", "train.old_logprobs", "model.tiny")
        )
    if replay == "none":
        return
    related = ("model.tiny", "train.old_logprobs", "rollout.engine")
    if recipe.model.tiny == "qwen3":
        text = f'"{replay}" has no effect with model.tiny = "qwen3", which has no experts; take "qwen3_moe" or "none"'
        yield Finding("error", "moe.replay", text, related)
    elif replay == "r2" and recipe.train.old_logprobs != "recompute":
        yield Finding(
            "error",
            "moe.replay",
            '"r2" forces the routes that the trainer takes under the old weights, so it has to score every response '
            'first; set train.old_logprobs = "recompute", or take "r3", the routes of the engine',
            related,
        )
    elif replay == "r3" and recipe.rollout.engine == "scripted":
        text = '"r3" forces the routes of the sampling engine, and a script has none; take "r2" or "none"'
        yield Finding("error", "moe.replay", text, related)


def _bundle_key(message: str) -> str:
    """The key that a sentence about the bundle starts with."""
    first = message.split()[0]
    if first in ("clip_low", "clip_high"):
        return f"objective.{first}"
    if "unit" in message.split("'")[0]:
        return "objective.unit"
    return "train.num_mini_batches" if "num_mini_batches" in message else "objective.name"


def _calibration_findings(recipe: Recipe) -> Iterator[Finding]:
    objective = recipe.objective
    if clips(recipe) and objective.name not in SEQUENCE_RATIO:
        yield Finding(
            "error",
            "objective.clip",
            f'"calibrated" measures the sequence ratio, and {objective.name} has '
            f'{"a token ratio" if objective.name in TOKEN_RATIO else "another band"}; take "paper" or "explicit"',
            ("objective.name",),
        )
    if not 0 < objective.clip_target < 1:
        text = f"{objective.clip_target:g} must be between 0 and 1, neither included; 0.15 is the paper's"
        yield Finding("error", "objective.clip_target", text)
    train = recipe.train
    warmup = math.ceil(train.warmup_steps / train.num_mini_batches)
    if warmup + objective.calibration_steps >= train.num_steps:
        after = f", after {warmup} of learning-rate warm-up," if warmup else ""
        yield Finding(
            "warning",
            "objective.calibration_steps",
            f"the bounds freeze after {objective.calibration_steps} steps{after} and train.num_steps = "
            f"{train.num_steps}: they never do",
            ("train.num_steps", "train.warmup_steps"),
        )


def _batch_findings(recipe: Recipe) -> Iterator[Finding]:
    sizes = ("rollout.prompts_per_step", "rollout.group_size", "train.num_mini_batches", "train.micro_batch_size")
    try:
        plan_recipe(recipe, num_prompts(recipe))
    except ConfigError as error:
        message = str(error)
        at = next((key for key in ("data.num_prompts", *sizes) if message.startswith(key)), sizes[0])
        yield Finding("error", at, message.removeprefix(at).removeprefix(" = ").strip(), (*sizes, "data.num_prompts"))


def _schedule_findings(recipe: Recipe) -> Iterator[Finding]:
    train, sft = recipe.train, recipe.sft
    yield from _warmup_findings("train", train.warmup_steps, train.num_steps * train.num_mini_batches)
    yield from _beta_findings("train", train.betas)
    if train.random_drop and len(train.random_drop) != train.num_mini_batches:
        text = f"has {len(train.random_drop)} values; it takes one for each of train.num_mini_batches = "
        yield Finding(
            "error", "train.random_drop", f"{text}{train.num_mini_batches}, in their order", ("train.num_mini_batches",)
        )
    if sft is not None:
        yield from _warmup_findings("sft", sft.warmup_steps, sft.num_steps)
        yield from _beta_findings("sft", sft.betas)
    for key, every in (("eval.every", recipe.eval.every), ("checkpoint.every", recipe.checkpoint.every)):
        if every > train.num_steps and is_set(recipe, key):
            text = f"{every} is more than train.num_steps = {train.num_steps}: it never comes round during the run"
            yield Finding("warning", key, text, ("train.num_steps",))


def _warmup_findings(section: str, warmup: int, num_updates: int) -> Iterator[Finding]:
    related = (f"{section}.num_steps", *(["train.num_mini_batches"] if section == "train" else []))
    if warmup >= num_updates:
        text = f"{warmup} updates of warm-up, and the run has {num_updates}: the learning rate is reached at its end"
        yield Finding("warning", f"{section}.warmup_steps", text, related)


def _beta_findings(section: str, betas: tuple[float, float]) -> Iterator[Finding]:
    if max(betas) >= 1:
        text = f"{toml_value(betas)}: each must be below 1, or AdamW never forgets; [0.9, 0.95] is usual"
        yield Finding("error", f"{section}.betas", text)


def _eval_findings(recipe: Recipe) -> Iterator[Finding]:
    config = recipe.eval
    large = [k for k in config.k if k > config.num_samples]
    if large:
        text = f"pass@{max(large)} needs at least {max(large)} samples; eval.num_samples = {config.num_samples}"
        yield Finding("error", "eval.k", text, ("eval.num_samples",))
    if config.temperature == 0 and config.num_samples > 1:
        text = f"0 is greedy: all eval.num_samples = {config.num_samples} samples are the same; 1 is enough"
        yield Finding("warning", "eval.temperature", text, ("eval.num_samples",))


def _held_out_findings(recipe: Recipe, command: Command) -> Iterator[Finding]:
    related = ("data.path", "data.task", "data.eval")
    if has_held_out(recipe):
        held_out = recipe.data.eval
        same = held_out is not None and same_file(held_out.path, recipe.data.path)
        if same and held_out is not None and held_out.num_prompts is None:
            text = "is needed: [data.eval] reads the training file, and what it takes is left out of training"
            yield Finding("error", "data.eval.num_prompts", text, related)
        return
    if recipe.data.path is None:
        return
    remedy = "there are no held-out prompts; add [data.eval] with a path or a task"
    if command == "eval":
        yield Finding("error", "data.eval", remedy, related)
        return
    for name in sorted(recipe.eval.model_fields_set):
        yield useless(recipe, f"eval.{name}", f"because {remedy}", *related)
    if recipe.sft is not None and recipe.sft.stop_at_pass is not None:
        yield useless(recipe, "sft.stop_at_pass", f"because {remedy}", *related)
    yield Finding("warning", "data.eval", f"{remedy}, or nothing is evaluated", related)


def same_file(one: str | None, other: str | None) -> bool:
    """Whether two paths of a recipe are the same file, however they are written."""
    return one is not None and other is not None and Path(one).resolve() == Path(other).resolve()


# Files.


def check_files(recipe: Recipe) -> list[Finding]:
    """Whether the files and directories that a recipe names are there (relative to the working directory)."""
    named = [
        ("data.path", recipe.data.path),
        ("data.eval.path", recipe.data.eval.path if recipe.data.eval else None),
        ("rollout.script", recipe.rollout.script),
        ("sft.path", recipe.sft.path if recipe.sft else None),
    ]
    missing = [
        Finding("error", key, f'there is no file or directory "{path}" (looked in {Path.cwd()})')
        for key, path in named
        if path is not None and not Path(path).exists()
    ]
    return [*missing, *path_findings(recipe)]
