"""Recipes drawn over every key of the schema, valid and at the border, small enough to be run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from hypothesis import strategies as st

from gspo.config.keys import Key, flat_types, recipe_keys
from gspo.config.source import toml_value

Tree = dict[str, Any]

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4}

#: What every drawn recipe starts from: two prompts, four responses of three tokens.
BASE: Mapping[str, Any] = {
    "model.tiny": "qwen3",
    "model.tiny_config": SIZES,
    "data.task": "arithmetic:addition",
    "data.num_prompts": 6,
    "data.eval.num_prompts": 2,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 3,
    "train.num_steps": 2,
    "train.num_mini_batches": 2,
    "train.learning_rate": 1e-3,
    "eval.num_samples": 2,
}
OWN = {"name": "tests.config.tiny_rewards:close"}
FILE: Mapping[str, Any] = {
    "data.task": None, "data.path": "train.jsonl", "data.num_prompts": 5, "data.eval.path": "held_out.jsonl",
    "reward.functions": [OWN],
}  # fmt: skip
#: Keys that have an effect only together.
BUNDLES: tuple[Mapping[str, Any], ...] = (
    {"model.tiny": "qwen3_moe", "model.tiny_config": SIZES | EXPERTS},
    {"model.tiny": "qwen3_moe", "model.tiny_config": SIZES | EXPERTS, "moe.replay": "r3"},
    {"model.tiny": "qwen3_moe", "model.tiny_config": SIZES | EXPERTS, "moe.replay": "r2",
     "train.old_logprobs": "recompute"},
    FILE,
    {**FILE, "data.path": "chat.jsonl", "data.num_prompts": 3},
    {**FILE, "reward.functions": [{"name": "number"}]},
    {**FILE, "reward.functions": [OWN], "reward.isolate": True, "reward.num_workers": 1},
    {"objective.clip": "explicit", "objective.clip_low": 0.01, "objective.clip_high": 0.02},
    {"objective.clip": "calibrated", "objective.calibration_steps": 1},
    {"objective.name": "grpo", "objective.unit": "token"},
    {"objective.name": "dr_grpo", "advantage.scale": "none"},
    {"objective.kl_coefficient": 0.1},
    {"train.old_logprobs": "recompute", "objective.correction.kind": "tis"},
    {"train.old_logprobs": "recompute", "objective.correction.kind": "seq_geo"},
    {"train.groups_without_signal": "refill"},
    {"train.truncated": "exclude"},
    {"checkpoint.every": 1, "eval.every": 1},
    {"checkpoint.every": 1, "guard.reaction": "go_back"},
    {"sft.task": "arithmetic:addition", "sft.num_pairs": 4, "sft.num_steps": 2, "sft.batch_size": 2},
    {"sft.path": "pairs.jsonl", "sft.num_steps": 2, "sft.batch_size": 2},
    {"rollout.engine": "scripted", "rollout.script": "script.jsonl", "train.old_logprobs": "recompute", **FILE,
     "data.num_prompts": None, "data.eval.path": None, "data.eval.num_prompts": None, "eval.num_samples": None},
    {"run.preset": "modern"},
    {"run.preset": "paper"},
)  # fmt: skip

_COUNTS = st.sampled_from([1, 2, 3, 5])
_SMALL = st.sampled_from([1e-6, 1e-3, 0.1, 0.5])
_FACTORS = st.sampled_from([1e-12, 1e-3, 0.5, 1.0, 2.0, 100.0])
_WORDS = st.sampled_from(["", " ", "abc", "1+1=", 'a "quoted" \\ line\nand more', "naïve ∑ 数", "x" * 90, "<|im_end|>"])
#: Keys for which the type alone says too little (or too much: a run has to stay small).
VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "run.device": st.sampled_from(["cpu", "auto", "gpu", "cpu:0"]),
    "run.num_threads": st.sampled_from([0, 1]),
    "model.path": st.sampled_from(["no/such", ".", "train.jsonl", "./none"]),
    "model.tiny_config": st.sampled_from([
        {}, SIZES | {"head_dim": 15}, SIZES | {"num_attention_heads": 3, "num_key_value_heads": 2}, SIZES | EXPERTS,
        SIZES | {"max_position_embeddings": 12}, SIZES | {"hiden_size": 4}, SIZES | {"vocab_size": 5},
        SIZES | EXPERTS | {"num_experts": 1}, SIZES | {"tie_word_embeddings": False, "attention_bias": True},
    ]),
    "data.path": st.sampled_from(["train.jsonl", "chat.jsonl", "none.jsonl", "held_out.jsonl"]),
    "data.task": st.sampled_from(["arithmetic:addition", "arithmetic:subtraction", "addition", ""]),
    "data.task_options": st.sampled_from([{}, {"digits": 1}, {"digits": 0}, {"terms": 3}, {"base": 2}]),
    "data.prompt_column": st.sampled_from(["prompt", "question", "answer"]),
    "data.template_options": st.sampled_from([{}, {"enable_thinking": False}, {"messages": 3}]),
    "data.max_prompt_tokens": st.sampled_from([1, 20, 125, 126, 4000]),
    "rollout.max_new_tokens": st.sampled_from([1, 2, 4, 125, 127, 128, 4096]),
    "rollout.stop_strings": st.sampled_from([[], ["a"], ["", "b"], ["ab", "cd"], ["\n"]]),
    "rollout.group_size": st.sampled_from([-1, 0, 1, 2, 3]),
    "rollout.script": st.sampled_from(["script.jsonl", "train.jsonl"]),
    "reward.functions": st.lists(st.sampled_from([
        OWN, {**OWN, "weight": 0.0}, {**OWN, "weight": -1.0}, {**OWN, "options": {"floor": 0.25}}, {"name": "number"},
        {"name": "exact_match", "options": {"a": 1}}, {"name": "task"}, {"name": "nosuch"}, {"name": "tests.none:f"},
        {"name": "tests.config.tiny_rewards:compute_score", "kind": "verl"},
    ]), max_size=2),
    "reward.timeout_s": st.sampled_from([20.0, 60.0]),
    "reward.memory_limit_mb": st.sampled_from([2048, 4096]),
    "reward.answer_column": st.sampled_from(["answer", "prompt", "nothing"]),
    "reward.environment": st.sampled_from([[], ["HOME"], ["A_TOKEN"]]),
    "guard.reactions": st.sampled_from([{}, {"reward_drop": "stop"}, {"nosuch": "warn"}, {"kl_spike": "panic"}]),
    "objective.clip_target": st.sampled_from([0.0, 0.15, 1.0]),
    "train.learning_rate": _SMALL,
    "train.random_drop": st.sampled_from([[], [0.5], [0.0], [0.25, 0.75]]),
    "train.betas": st.sampled_from([[0.0, 0.0], [0.9, 0.99], [1.0, 0.5], [0.9]]),
    "train.adam_eps": st.sampled_from([1e-12, 1e-8, 1.0]),
    "train.weight_decay": st.sampled_from([0.0, 0.1, 1.0]),
    "train.micro_batch_tokens": st.sampled_from([1, 16, 16384]),
    "eval.k": st.sampled_from([[1], [2], [1, 2, 2], [], [9]]),
    "eval.temperature": st.sampled_from([0.0, 1e-3, 1.0, 50.0]),
    "rollout.temperature": st.sampled_from([1e-3, 0.5, 1.0, 50.0]),
    "eval.max_new_tokens": st.sampled_from([1, 5, 120, 127, 4096]),
    "eval.threshold": st.sampled_from([-1.0, 0.0, 0.5, 1e9]),
    "eval.confidence": st.sampled_from([1e-6, 0.5, 0.999999]),
    "sft.num_steps": st.sampled_from([1, 2, 3]),
    "sft.learning_rate": _SMALL,
    "sft.path": st.sampled_from(["pairs.jsonl", "train.jsonl"]),
    "sft.task": st.sampled_from(["arithmetic:addition", "reasoning_gym:nosuch"]),
}  # fmt: skip
#: The same for a key with the same name in another section.
_LIKE = {"data.eval": "data", "sft": "train"}


def values(key: Key) -> st.SearchStrategy[Any]:
    """Values of a key: mostly ones that its type admits."""
    section, _, leaf = key.name.rpartition(".")
    for name in (key.name, f"{_LIKE.get(section, section)}.{leaf}", f"data.{leaf}"):
        if name in VALUES:
            return VALUES[name]
    return _by_type(key)


def _by_type(key: Key) -> st.SearchStrategy[Any]:
    member = flat_types(key.field.annotation)[0]
    if get_origin(member) is not None and hasattr(member, "__metadata__"):
        member = get_args(member)[0]
    if hasattr(member, "__args__") and all(isinstance(word, str) for word in get_args(member)):
        return st.sampled_from(get_args(member))
    if member is bool:
        return st.booleans()
    if member is int:
        return st.one_of(_COUNTS, st.sampled_from([0, 1, 4]))
    if member is float:
        return _FACTORS
    return _WORDS


#: Every key; of an array of tables the array itself.
KEYS = [key for name, key in recipe_keys().items() if not name.startswith("reward.functions.")]


@st.composite
def recipes(draw: st.DrawFn) -> Tree:
    """Dotted keys and values: a base, a few bundles, a few keys of any section."""
    tree: Tree = dict(BASE)
    for bundle in draw(st.lists(st.sampled_from(BUNDLES), max_size=3)):
        tree |= bundle
    chosen = draw(st.lists(st.sampled_from([*KEYS, None]), max_size=5, unique_by=lambda key: key and key.name))
    for key in chosen:
        if key is None:
            tree["reward.functions"] = draw(VALUES["reward.functions"])
        else:
            tree[key.name] = draw(values(key))
    return {name: value for name, value in tree.items() if value is not None}


def recipe_toml(tree: Tree) -> str:
    """The recipe as a file: top-level dotted keys, which TOML reads as sections."""
    return "".join(f"{name} = {toml_value(value)}\n" for name, value in tree.items())


def write_files(folder: Path) -> None:
    """The files that drawn recipes name."""
    files: dict[str, list[dict[str, Any]]] = {
        "train.jsonl": [{"prompt": f"{n}+{n}=", "question": f"{n} twice?", "answer": str(2 * n)} for n in range(5)],
        "held_out.jsonl": [
            {"prompt": f"{n}+1=", "question": f"after {n}?", "answer": str(n + 1)} for n in range(20, 22)
        ],
        "chat.jsonl": [{"prompt": [{"role": "user", "content": f"{n}-{n}"}], "answer": "0"} for n in range(3)],
        "pairs.jsonl": [{"prompt": f"{n}*1=", "question": "q", "response": str(n), "answer": "1"} for n in range(4)],
        "script.jsonl": [{"prompt_id": f"train.jsonl:{n}", "completions": ["1", "22", str(n)]} for n in range(1, 6)],
    }
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
