"""Every key of a recipe by its dotted name, and which valid key a wrong one probably means.

Works on the schema alone: no recipe is read here.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gspo.config.schema import Recipe, Section

#: What other frameworks and papers call our keys.
FOREIGN_NAMES: Final[Mapping[str, str]] = types.MappingProxyType(
    {
        "adv_estimator": "advantage.scale",
        "adv_normalise": "advantage.scale",
        "adv_normalize": "advantage.scale",
        "advantage_estimator": "advantage.scale",
        "algorithm": "objective.name",
        "beta": "objective.kl_coefficient",
        "clip_eps": "objective.clip_high",
        "clip_range": "objective.clip_high",
        "clip_ratio_high": "objective.clip_high",
        "clip_ratio_low": "objective.clip_low",
        "cliprange_high": "objective.clip_high",
        "cliprange_low": "objective.clip_low",
        "dataset": "data.path",
        "dataset_name": "data.path",
        "eps_clip": "objective.clip_low",
        "eps_clip_high": "objective.clip_high",
        "eps_high": "objective.clip_high",
        "eps_low": "objective.clip_low",
        "epsilon": "objective.clip_low",
        "epsilon_high": "objective.clip_high",
        "epsilon_low": "objective.clip_low",
        "eval_steps": "eval.every",
        "gradient_clipping": "train.max_grad_norm",
        "grad_clip": "train.max_grad_norm",
        "importance_sampling_level": "objective.name",
        "kl_coef": "objective.kl_coefficient",
        "kl_loss_coef": "objective.kl_coefficient",
        "kl_loss_type": "objective.kl_estimator",
        "logging_samples": "train.num_logged_samples",
        "loss_agg_mode": "objective.unit",
        "loss_type": "objective.unit",
        "lr": "train.learning_rate",
        "lr_scheduler_type": "train.schedule",
        "lr_warmup_steps": "train.warmup_steps",
        "mask_truncated_completions": "train.truncated",
        "max_completion_length": "rollout.max_new_tokens",
        "max_prompt_length": "data.max_prompt_tokens",
        "max_response_length": "rollout.max_new_tokens",
        "max_steps": "train.num_steps",
        "max_tokens": "rollout.max_new_tokens",
        "model_name_or_path": "model.path",
        "n_samples_per_prompt": "rollout.group_size",
        "num_generations": "rollout.group_size",
        "num_iterations": "train.num_mini_batches",
        "per_device_train_batch_size": "train.micro_batch_size",
        "ppo_micro_batch_size_per_gpu": "train.micro_batch_size",
        "reward_funcs": "reward.functions",
        "reward_weights": "reward.functions.weight",
        "rollout_batch_size": "rollout.prompts_per_step",
        "rollout_n": "rollout.group_size",
        "save_steps": "checkpoint.every",
        "save_total_limit": "checkpoint.keep_last",
        "scale_rewards": "advantage.scale",
        "routing_replay": "moe.replay",
        "tau_neg": "objective.tau_negative",
        "tau_pos": "objective.tau_positive",
        "steps_per_generation": "train.num_mini_batches",
        "torch_dtype": "model.dtype",
        "total_training_steps": "train.num_steps",
        "train_batch_size": "rollout.prompts_per_step",
    }
)


@dataclass(frozen=True)
class Key:
    """One key of a recipe.

    >>> recipe_keys()["rollout.group_size"].default
    8
    """

    name: str  # dotted, "reward.functions.weight" for a key of an array of tables
    section: str  # "rollout", "data.eval", "reward.functions"
    field: FieldInfo

    @property
    def default(self) -> Any:
        """The default value, or ``PydanticUndefined`` for a key that has none."""
        return self.field.get_default(call_default_factory=True, validated_data={})

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined

    @property
    def expects(self) -> str:
        """What would work, in words: "a whole number greater than 0"."""
        return _describe(self.field.annotation, self.field.metadata)


def flat_types(annotation: Any) -> tuple[Any, ...]:
    """The members of a union without None; ``Annotated`` and other types as they are."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for member in get_args(annotation) if member is not type(None))
    return (annotation,)


def section_type(annotation: Any) -> type[Section] | None:
    """The section that a field of this type holds (also ``X | None`` and ``tuple[X, ...]``), or None."""
    for member in flat_types(annotation):
        inner = get_args(member)[0] if get_origin(member) is tuple else member
        if isinstance(inner, type) and issubclass(inner, Section):
            return inner
    return None


@cache
def recipe_sections() -> Mapping[str, type[Section]]:
    """Every section by its dotted name, in the order of the schema."""
    return dict(_walk_sections("", Recipe))


def _walk_sections(prefix: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    for name, field in section.model_fields.items():
        inner = section_type(field.annotation)
        if inner is not None:
            yield f"{prefix}{name}", inner
            yield from _walk_sections(f"{prefix}{name}.", inner)


@cache
def recipe_keys() -> Mapping[str, Key]:
    """Every key that holds a value (not a section) by its dotted name."""
    return {
        f"{section}.{name}": Key(f"{section}.{name}", section, field)
        for section, model in recipe_sections().items()
        for name, field in model.model_fields.items()
        if section_type(field.annotation) is None
    }


def admits_text(annotation: Any) -> bool:
    """Whether a bare word can be a value of this type (text, or one of several words)."""
    return any(
        member is str or (get_origin(member) is Literal and all(isinstance(word, str) for word in get_args(member)))
        for member in flat_types(annotation)
    )


@dataclass(frozen=True)
class Guess:
    """What is said about a key that does not exist, and the key that was probably meant."""

    text: str
    target: str | None


def guess_key(name: str) -> Guess:
    """The probable meaning of the unknown dotted key ``name``.

    In this order: a key of another section, a name that other frameworks use, the nearest name of any kind.

    >>> guess_key("objective.epsilom_high").target
    'objective.clip_high'
    """
    section, _, leaf = name.replace("-", "_").rpartition(".")
    own = [key for key in recipe_keys() if key.rpartition(".")[2] == leaf]
    if own:
        places = " or ".join(f"[{key.rpartition('.')[0]}]" for key in own)
        return Guess(f"unknown key here; it belongs to section {places}", own[0])
    foreign = FOREIGN_NAMES.get(leaf.lower())
    if foreign:
        home, _, ours = foreign.rpartition(".")
        if home == section:
            return Guess(f"unknown key; did you mean {foreign}?", foreign)
        return Guess(f"unknown key here; it belongs to section [{home}], where it is called {ours}", foreign)
    return _nearest(section, leaf.lower())


def _nearest(section: str, leaf: str) -> Guess:
    own = [key.rpartition(".")[2] for key in recipe_keys() if key.rpartition(".")[0] == section]
    near_here = difflib.get_close_matches(leaf, own, n=1, cutoff=0.75)
    containing = [name for name in own if len(leaf) > 3 and name.startswith(leaf)]
    if not near_here and len(containing) == 1:
        near_here = containing
    if near_here:
        return Guess(f"unknown key; did you mean {section}.{near_here[0]}?", f"{section}.{near_here[0]}")
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(list(recipe_keys()))}
    match = difflib.get_close_matches(leaf, [*by_leaf, *FOREIGN_NAMES], n=1, cutoff=0.7)
    if not match:
        known = ", ".join(key.rpartition(".")[2] for key in recipe_keys() if key.rpartition(".")[0] == section)
        return Guess(f"unknown key; section [{section}] has {known}" if known else "unknown key", None)
    if match[0] in by_leaf:
        return Guess(f"unknown key; did you mean {by_leaf[match[0]]}?", by_leaf[match[0]])
    target = FOREIGN_NAMES[match[0]]
    return Guess(f"unknown key; did you mean {target} ({match[0]} in other frameworks)?", target)


def guess_section(name: str, keys: list[str]) -> Guess:
    """The probable meaning of an unknown section that holds ``keys``."""
    known = recipe_sections()
    match = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    if match:
        return Guess(f"unknown section; did you mean [{match[0]}]?", match[0])
    targets = [target for target in (guess_key(f"{name}.{key}").target for key in keys) if target]
    if targets:
        return Guess(f"unknown section; did you mean {', '.join(targets)}?", None)
    top = ", ".join(section for section in known if "." not in section)
    return Guess(f"unknown section; the sections are {top}", None)


_NUMBERS: Final[Mapping[Any, str]] = types.MappingProxyType({int: "a whole number", float: "a number"})
_PLURALS: Final[Mapping[str, str]] = types.MappingProxyType(
    {"a whole number": "whole numbers", "a number": "numbers", "text": "texts"}
)


def _describe(annotation: Any, metadata: list[Any]) -> str:
    member = flat_types(annotation)[0]
    if get_origin(member) is Annotated:
        inner, *extra = get_args(member)
        found = [item for part in extra for item in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return _describe(inner, [*found, *metadata])
    if get_origin(member) is Literal:
        return "one of " + ", ".join(f'"{word}"' for word in get_args(member))
    if member in _NUMBERS:
        return _NUMBERS[member] + _limits(metadata)
    if get_origin(member) is tuple:
        return _describe_list(get_args(member))
    if get_origin(member) is dict:
        return "a table, e.g. { name = 1 }"
    return "true or false" if member is bool else "text"


def _describe_list(members: tuple[Any, ...]) -> str:
    inner = _describe(members[0], [])
    for one, several in _PLURALS.items():
        if inner.startswith(one):
            inner = several + inner.removeprefix(one)
            break
    return f"a list of {inner}" if members[-1] is Ellipsis else f"a list of {len(members)} {inner}"


def _limits(metadata: list[Any]) -> str:
    words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
    found = {name: getattr(item, name) for item in metadata for name in words if getattr(item, name, None) is not None}
    if {"ge", "le"} <= found.keys():
        return f" from {found['ge']:g} to {found['le']:g}"
    parts = [f"{words[name]} {value:g}" for name, value in found.items()]
    return " " + " and ".join(parts) if parts else ""
