"""Keys that a recipe sets although they do nothing beside its other keys; each is an error.

What counts is what the user wrote (``model_fields_set``), not the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from gspo.config.findings import Finding
from gspo.config.schema import DataConfig, GoBackConfig, Recipe
from gspo.config.source import toml_value
from gspo.objectives.bundle import PAPER_BOUNDS


def is_set(recipe: Recipe, key: str) -> bool:
    """Whether the user wrote this dotted key."""
    *sections, leaf = key.split(".")
    node: Any = recipe
    for section in sections:
        node = getattr(node, section)
        if node is None:
            return False
    return leaf in node.model_fields_set


def value_of(recipe: Recipe, key: str) -> Any:
    node: Any = recipe
    for part in key.split("."):
        node = getattr(node, part)
    return node


def clips(recipe: Recipe) -> bool:
    """Whether the objective has bounds."""
    return PAPER_BOUNDS[recipe.objective.name] is not None


def goes_back(recipe: Recipe) -> bool:
    """Whether a detector may send the run back to a checkpoint."""
    return "go_back" in (recipe.guard.reaction, *recipe.guard.reactions.values())


@dataclass(frozen=True)
class _Condition:
    """``keys`` do something only while ``holds``."""

    keys: tuple[str, ...]
    holds: Callable[[Recipe], bool]
    needs: str  # completes "has no effect ..."
    related: tuple[str, ...]


CLIPS = ("objective.clip_low", "objective.clip_high")

_CONDITIONS: Final = (
    _Condition(
        ("model.tiny_config",), lambda r: r.model.tiny is not None, "without model.tiny; set that too", ("model.tiny",)
    ),
    _Condition(
        ("model.gguf_file", "model.trust_remote_code"),
        lambda r: r.model.path is not None,
        "without model.path; set that too",
        ("model.path",),
    ),
    _Condition(
        ("rollout.script",),
        lambda r: r.rollout.engine == "scripted",
        'unless rollout.engine = "scripted"',
        ("rollout.engine",),
    ),
    _Condition(
        ("rollout.max_slots",),
        lambda r: r.rollout.engine != "scripted",
        'with rollout.engine = "scripted", which decodes nothing',
        ("rollout.engine",),
    ),
    _Condition(
        ("reward.memory_limit_mb", "reward.environment"),
        lambda r: r.reward.isolate,
        "without reward.isolate = true",
        ("reward.isolate",),
    ),
    _Condition(("reward.audit_num_prompts",), lambda r: r.reward.audit, "with reward.audit = false", ("reward.audit",)),
    _Condition(
        CLIPS,
        lambda r: r.objective.clip == "explicit" or not clips(r),
        'unless objective.clip = "explicit"',
        ("objective.clip", "objective.name"),
    ),
    _Condition(
        ("objective.clip", *CLIPS),
        lambda r: r.objective.name != "pg",
        'with objective.name = "pg", which does not clip',
        ("objective.name",),
    ),
    _Condition(
        ("objective.clip", *CLIPS),
        lambda r: r.objective.name != "sapo",
        'with objective.name = "sapo", which has temperatures in place of a clip',
        ("objective.name",),
    ),
    _Condition(
        ("objective.tau_positive", "objective.tau_negative"),
        lambda r: r.objective.name == "sapo",
        'unless objective.name = "sapo"',
        ("objective.name",),
    ),
    _Condition(
        ("objective.length_divisor",),
        lambda r: r.objective.name == "dr_grpo",
        'unless objective.name = "dr_grpo"',
        ("objective.name",),
    ),
    _Condition(
        ("objective.correction.low",),
        lambda r: r.objective.correction.kind in ("icepop", "seq_geo", "seq_prod"),
        'unless objective.correction.kind is "icepop", "seq_geo" or "seq_prod"',
        ("objective.correction.kind",),
    ),
    _Condition(
        ("objective.correction.high",),
        lambda r: r.objective.correction.kind != "none",
        'with objective.correction.kind = "none"; set that too',
        ("objective.correction.kind",),
    ),
    _Condition(
        ("moe.metrics", "moe.load_balancing_coefficient"),
        lambda r: r.model.tiny != "qwen3",
        'with model.tiny = "qwen3", which has no experts',
        ("model.tiny",),
    ),
    _Condition(
        ("objective.clip_target", "objective.calibration_steps"),
        lambda r: r.objective.clip == "calibrated",
        'unless objective.clip = "calibrated"',
        ("objective.clip",),
    ),
    _Condition(
        ("objective.kl_estimator",),
        lambda r: r.objective.kl_coefficient > 0,
        "with objective.kl_coefficient = 0; set that above 0",
        ("objective.kl_coefficient",),
    ),
    _Condition(
        ("advantage.std_floor",),
        lambda r: r.advantage.scale in ("group_std", "batch_std"),
        'unless advantage.scale is "group_std" or "batch_std": nothing is divided by a standard deviation',
        ("advantage.scale",),
    ),
    _Condition(
        ("train.micro_batch_tokens",),
        lambda r: r.train.micro_batch_size is None,
        "with train.micro_batch_size, which cuts by count; keep one of the two",
        ("train.micro_batch_size",),
    ),
    _Condition(
        ("train.mismatch_bound",),
        lambda r: r.train.old_logprobs != "recompute",
        'with train.old_logprobs = "recompute", which trusts no engine; "auto" and "engine" do',
        ("train.old_logprobs",),
    ),
    _Condition(
        ("train.max_refills",),
        lambda r: r.train.groups_without_signal == "refill",
        'unless train.groups_without_signal = "refill"',
        ("train.groups_without_signal",),
    ),
    _Condition(
        ("checkpoint.keep_last", "checkpoint.keep_best"),
        lambda r: r.checkpoint.every > 0,
        "with checkpoint.every = 0, which saves one checkpoint; set that above 0",
        ("checkpoint.every",),
    ),
    _Condition(
        ("checkpoint.keep_best",),
        lambda r: r.eval.every > 0 and (r.data.eval is not None or r.data.task is not None),
        "without evaluations during the run; set eval.every above 0 and give [data.eval] prompts",
        ("eval.every", "data.eval"),
    ),
    _Condition(
        ("guard.max_non_finite",),
        lambda r: r.guard.non_finite == "skip",
        'unless guard.non_finite = "skip"',
        ("guard.non_finite",),
    ),
    _Condition(
        tuple(f"guard.go_back.{name}" for name in GoBackConfig.model_fields),
        goes_back,
        'unless guard.reaction or one of guard.reactions is "go_back"',
        ("guard.reaction", "guard.reactions"),
    ),
    _Condition(
        ("guard.go_back.bounds_factor", "guard.go_back.clip_low", "guard.go_back.clip_high"),
        clips,
        "with an objective.name that does not clip",
        ("objective.name",),
    ),
    _Condition(
        ("guard.go_back.bounds_factor",),
        lambda r: r.guard.go_back.clip_low is None and r.guard.go_back.clip_high is None,
        "with guard.go_back.clip_low and clip_high; keep one of the two",
        ("guard.go_back.clip_low", "guard.go_back.clip_high"),
    ),
    _Condition(
        ("sft.checkpoint_every",),
        lambda r: r.sft is None or r.sft.checkpoint_every < r.sft.num_steps,
        "unless it is below sft.num_steps",
        ("sft.num_steps",),
    ),
    _Condition(
        ("sft.task_options", "sft.num_pairs"),
        lambda r: r.sft is None or r.sft.task is not None,
        "without sft.task; set that too",
        ("sft.task",),
    ),
    _Condition(
        ("sft.response_column",),
        lambda r: r.sft is None or r.sft.path is not None,
        "without sft.path; set that too",
        ("sft.path",),
    ),
    _Condition(
        ("sft.eval_every",),
        lambda r: r.sft is None or r.sft.stop_at_pass is not None,
        "without sft.stop_at_pass; set that too",
        ("sft.stop_at_pass",),
    ),
)


def useless(recipe: Recipe, key: str, needs: str, *related: str) -> Finding:
    return Finding("error", key, f"{toml_value(value_of(recipe, key))} has no effect {needs}", related)


def useless_keys(recipe: Recipe) -> Iterator[Finding]:
    for condition in _CONDITIONS:
        if not condition.holds(recipe):
            for key in condition.keys:
                if is_set(recipe, key):
                    yield useless(recipe, key, condition.needs, *condition.related)
    yield from _data_keys(recipe)


def _data_keys(recipe: Recipe) -> Iterator[Finding]:
    for prefix, data in _data_sections(recipe):
        sources = (f"{prefix}.path", f"{prefix}.task")
        if data.task is None and is_set(recipe, f"{prefix}.task_options"):
            yield useless(recipe, f"{prefix}.task_options", f"without {prefix}.task; set that too", *sources)
        reads_pairs = prefix == "data" and recipe.sft is not None and recipe.sft.path is not None
        if data.path is None and not reads_pairs and is_set(recipe, f"{prefix}.prompt_column"):
            yield useless(recipe, f"{prefix}.prompt_column", f"without {prefix}.path; set that too", *sources)
        if data.chat_template == "never":
            for key in (f"{prefix}.template_options", f"{prefix}.system_prompt"):
                if is_set(recipe, key):
                    template = f"{prefix}.chat_template"
                    yield useless(recipe, key, f'with {template} = "never"', template)


def _data_sections(recipe: Recipe) -> Iterator[tuple[str, DataConfig]]:
    yield "data", recipe.data
    if recipe.data.eval is not None:
        yield "data.eval", recipe.data.eval
