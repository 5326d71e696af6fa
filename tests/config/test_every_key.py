"""Every key of a recipe changes something: the run (its events, weights or files), a part, or it is refused.

The table names for each key a value other than the default, and where the difference is seen:

- ``run``: the run directory differs in more than the recipe, times and the size of a file;
- a part's name: limits of processes and memory leave the numbers of a healthy run alone, so it is seen that they
  reach the part that keeps them (whose own tests are elsewhere);
- ``refused``: there is nothing of that kind here (a second device, a GGUF file), or the value itself is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo import launch
from gspo.config import Recipe, load_recipe
from gspo.config.keys import recipe_keys
from gspo.errors import InputError
from gspo.events import read_events
from gspo.launch.attempts import Attempt, History
from gspo.launch.house import policy_of
from gspo.launch.settings import calibration_of, settings_of
from gspo.policy.causal_lm import CausalPolicy
from gspo.rewards.pool import VerifierPool
from gspo.rollout.embedded.engine import EmbeddedEngine
from gspo.rollout.retrying import RetryingEngine
from gspo.train.bounds import Bounds
from gspo.train.progress import Progress

from .drawing import BASE, EXPERTS, SIZES, recipe_toml, write_files

Tree = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A value in place of the default; ``given`` holds for both recipes, ``also`` for the changed one."""

    value: Any
    seen: str = "run"
    given: Tree | None = None
    also: Tree | None = None


OWN = {"name": "tests.config.tiny_rewards:close"}
DATA: Tree = {
    "data.task": None, "data.path": "train.jsonl", "data.num_prompts": None, "data.eval.num_prompts": None,
    "data.eval.path": "held_out.jsonl", "reward.functions": [OWN],
}  # fmt: skip
TASK: Tree = {"data.task": "arithmetic:addition", "data.eval.task": "arithmetic:addition"}
DIRECTORY: Tree = {**DATA, "model.tiny": None, "model.tiny_config": None, "model.path": "model"}
MOE: Tree = {"model.tiny": "qwen3_moe", "model.tiny_config": SIZES | EXPERTS, "train.old_logprobs": "recompute"}
EXPLICIT: Tree = {"objective.clip": "explicit", "objective.clip_low": 1e-3, "objective.clip_high": 1e-3}
SCRIPTED: Tree = {**DATA, "rollout.engine": "scripted", "rollout.script": "script.jsonl",
                  "train.old_logprobs": "recompute", "data.eval.path": None, "eval.num_samples": None}  # fmt: skip
SFT: Tree = {"sft.task": "arithmetic:addition", "sft.num_pairs": 6, "sft.num_steps": 2, "sft.batch_size": 2,
             "sft.learning_rate": 0.05, "sft.warmup_steps": 0}  # fmt: skip
PAIRS: Tree = {**SFT, "sft.task": None, "sft.num_pairs": None, "sft.path": "pairs.jsonl"}
ISOLATED: Tree = {**DATA, "reward.isolate": True}
BACK: Tree = {"checkpoint.every": 1, "guard.reaction": "go_back"}
ICEPOP: Tree = {"train.old_logprobs": "recompute", "objective.correction.kind": "icepop"}

CHANGES: dict[str, Change] = {
    "run.name": Change("other"),
    "run.seed": Change(1),
    "run.device": Change("cuda:97", "refused by the run"),
    "run.num_threads": Change(2, "threads"),
    "run.preset": Change("modern"),
    "model.path": Change("model", given=DATA, also={"model.tiny": None, "model.tiny_config": None}),
    "model.gguf_file": Change("weights.gguf", "refused", given=DIRECTORY),
    "model.tiny": Change("qwen3_moe"),
    "model.tiny_config": Change(SIZES | {"hidden_size": 32}),
    "model.dtype": Change("bfloat16"),
    "model.gradient_checkpointing": Change(True, "checkpointing"),
    "model.trust_remote_code": Change(True, given=DIRECTORY),
    "data.path": Change("other_train.jsonl", given=DATA),
    "data.task": Change("reasoning_gym:no_such_task", "refused", given=TASK),
    "data.task_options": Change({"digits": 1}),
    "data.num_prompts": Change(5),
    "data.seed": Change(7),
    "data.prompt_column": Change("question", given=DATA),
    "data.system_prompt": Change("Add."),
    "data.instruction": Change("!"),
    "data.chat_template": Change("never"),
    "data.template_options": Change({"mood": "glad"}, given={**DIRECTORY, "data.eval.template_options": {}}),
    "data.max_prompt_tokens": Change(3, "refused", given=DATA),
    "data.eval.path": Change("other_held_out.jsonl", given=DATA),
    "data.eval.task": Change("arithmetic:addition", given=DATA, also={"data.eval.path": None}),
    "data.eval.task_options": Change({"digits": 1}, "held-out prompts", given=TASK),
    "data.eval.num_prompts": Change(3),
    "data.eval.seed": Change(7, "held-out prompts"),
    "data.eval.prompt_column": Change("question", "held-out prompts", given=DATA),
    "data.eval.system_prompt": Change("Add.", "held-out prompts"),
    "data.eval.instruction": Change("!", "held-out prompts"),
    "data.eval.chat_template": Change("never", "held-out prompts"),
    "data.eval.template_options": Change({"mood": "glad"}, "held-out prompts", given=DIRECTORY),
    "data.eval.max_prompt_tokens": Change(3, "refused", given=DATA),
    "rollout.engine": Change("scripted", given={**SCRIPTED, "rollout.engine": None, "rollout.script": None},
                             also={"rollout.script": "script.jsonl"}),
    "rollout.script": Change("other_script.jsonl", given=SCRIPTED),
    "rollout.prompts_per_step": Change(3),
    "rollout.group_size": Change(3),
    "rollout.max_new_tokens": Change(4),
    "rollout.temperature": Change(0.5),
    "rollout.stop_strings": Change([chr(code) for code in range(32, 80)]),
    "rollout.max_slots": Change(2, "slots"),
    "rollout.prompts_per_call": Change(1, "calls"),
    "rollout.max_retries": Change(5, "engine"),
    "rollout.engine_failure": Change("keep", "engine"),
    "reward.timeout_s": Change(7.0, "verifiers", given=ISOLATED),
    "reward.num_workers": Change(1, "verifiers", given=ISOLATED),
    "reward.isolate": Change(True, "verifiers", given=DATA),
    "reward.memory_limit_mb": Change(1024, "verifiers", given=ISOLATED),
    "reward.environment": Change(["SOME_TOKEN"], "verifiers", given=ISOLATED),
    "reward.answer_column": Change("question", given=DATA, also={"reward.functions": [{"name": "exact_match"}]}),
    "reward.audit": Change(False),
    "reward.audit_num_prompts": Change(1),
    "reward.functions.name": Change("exact_match", given=DATA),
    "reward.functions.weight": Change(3.0, given=DATA),
    "reward.functions.kind": Change("verl", given=DATA, also={"reward.functions": [
        {"name": "tests.config.tiny_rewards:compute_score", "kind": "verl"}]}),
    "reward.functions.options": Change({"floor": 0.4}, given=DATA),
    "objective.name": Change("grpo"),
    "objective.clip": Change("calibrated"),
    "objective.clip_low": Change(1e-4, given=EXPLICIT),
    "objective.clip_high": Change(1e-4, given=EXPLICIT),
    "objective.unit": Change(  # tells only where lengths differ
        "token", given={"objective.name": "grpo", "rollout.stop_strings": [chr(code) for code in range(32, 80)]}
    ),
    "objective.clip_target": Change(0.9, "calibration", given={"objective.clip": "calibrated"}),
    "objective.calibration_steps": Change(1, given={"objective.clip": "calibrated"}),
    "objective.kl_coefficient": Change(0.5),
    "objective.kl_estimator": Change("k1", given={"objective.kl_coefficient": 0.5}),
    "objective.tau_positive": Change(50.0, given={"objective.name": "sapo"}),
    "objective.tau_negative": Change(50.0, given={"objective.name": "sapo"}),
    "objective.length_divisor": Change(1, given={"objective.name": "dr_grpo", "advantage.scale": "none"}),
    "objective.correction.kind": Change("tis", given={"train.old_logprobs": "recompute"}),
    "objective.correction.low": Change(1.5, given=ICEPOP),
    "objective.correction.high": Change(0.7, given=ICEPOP),
    "moe.replay": Change("r2", given=MOE),
    "moe.load_balancing_coefficient": Change(0.5, given=MOE),
    "moe.metrics": Change("none", given=MOE),
    "advantage.scale": Change("none"),
    "advantage.std_floor": Change(10.0),
    "train.num_steps": Change(1),
    "train.num_mini_batches": Change(1),
    "train.micro_batch_size": Change(1, "forwards"),
    "train.micro_batch_tokens": Change(1, "forwards"),
    "train.old_logprobs": Change("recompute", "settings"),
    "train.mismatch_bound": Change(1e-30, "settings"),
    "train.groups_without_signal": Change("drop", given={**DATA, "reward.functions": [{"name": "exact_match"}]}),
    "train.max_refills": Change(1, given={**DATA, "reward.functions": [{"name": "exact_match"}],
                                          "train.groups_without_signal": "refill"}),
    "train.truncated": Change("exclude"),
    "train.random_drop": Change([0.5, 0.0]),
    "train.learning_rate": Change(0.02),
    "train.warmup_steps": Change(2),
    "train.schedule": Change("linear"),
    "train.betas": Change([0.5, 0.6]),
    "train.adam_eps": Change(1.0),
    "train.weight_decay": Change(0.5),
    "train.max_grad_norm": Change(1e-4),
    "train.num_logged_samples": Change(1),
    "eval.every": Change(1),
    "eval.num_samples": Change(3),
    "eval.k": Change([1, 2]),
    "eval.temperature": Change(0.5),
    "eval.max_new_tokens": Change(1),
    "eval.threshold": Change(0.2, given=DATA),
    "eval.confidence": Change(0.5),
    "checkpoint.every": Change(1),
    "checkpoint.keep_last": Change(1, given={"checkpoint.every": 1}),
    "checkpoint.keep_best": Change(2, given={"checkpoint.every": 1, "checkpoint.keep_last": 1, "eval.every": 1}),
    "guard.non_finite": Change("stop", "settings"),
    "guard.max_non_finite": Change(1, "settings"),
    "guard.reaction": Change("stop", "settings"),
    "guard.reactions": Change({"reward_drop": "stop"}, "settings"),
    "guard.go_back.max_times": Change(1, "settings", given=BACK),
    "guard.go_back.learning_rate_factor": Change(0.25, "history", given=BACK),
    "guard.go_back.bounds_factor": Change(0.5, "history", given=BACK),
    "guard.go_back.clip_low": Change(0.3, "history", given=BACK, also={"guard.go_back.clip_high": 0.01}),
    "guard.go_back.clip_high": Change(0.3, "history", given=BACK, also={"guard.go_back.clip_low": 0.01}),
    "guard.go_back.num_mini_batches": Change(1, "history", given=BACK),
    "sft.path": Change("other_pairs.jsonl", given=PAIRS),
    "sft.task": Change("arithmetic:addition", given=PAIRS, also={"sft.path": None}),
    "sft.task_options": Change({"digits": 1}, given=SFT),
    "sft.num_pairs": Change(2, given=SFT),
    "sft.response_column": Change("answer", given=PAIRS),
    "sft.num_steps": Change(1, given=SFT),
    "sft.batch_size": Change(4, given=SFT),
    "sft.micro_batch_tokens": Change(1, "forwards", given=SFT),
    "sft.learning_rate": Change(0.01, given=SFT),
    "sft.warmup_steps": Change(2, given=SFT),
    "sft.schedule": Change("linear", given={**SFT, "sft.num_steps": 3}),
    "sft.betas": Change([0.5, 0.6], given=SFT),
    "sft.weight_decay": Change(0.5, given=SFT),
    "sft.max_grad_norm": Change(1e-6, given=SFT),
    "sft.stop_at_pass": Change(0.0, given=SFT, also={"sft.eval_every": 1}),
    "sft.eval_every": Change(1, given={**SFT, "sft.stop_at_pass": 1.0}),
    "sft.checkpoint_every": Change(1, "cold start", given=SFT),
}  # fmt: skip


def test_the_table_has_every_key() -> None:
    assert sorted(recipe_keys().keys() - CHANGES.keys()) == []
    assert sorted(CHANGES.keys() - recipe_keys().keys()) == []


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory: files that recipes name, each with a second one, and a model whose template has a mood."""
    from gspo.policy.tiny import tiny_model

    folder = tmp_path_factory.mktemp("keys")
    write_files(folder)
    for name in ("train", "held_out", "script", "pairs"):
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        other = [{**line, "completions": ["7"]} if name == "script" else {**line, "prompt": f"{n}-{n}="}
                 for n, line in enumerate(lines, start=30 if name == "held_out" else 50)]  # fmt: skip
        (folder / f"other_{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in other))
    model, tokenizer = tiny_model("qwen3", SIZES, seed=3)
    tokenizer.chat_template = "{{ mood|default('') }}" + tokenizer.chat_template
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def both(key: str) -> tuple[Tree, Tree]:
    """The recipe without and with the change."""
    change = CHANGES[key]
    plain = {**BASE, "train.learning_rate": 0.05, "reward.functions": [OWN], **(change.given or {})}
    changed = {**plain, **(change.also or {})}
    section, _, leaf = key.rpartition(".")
    if section == "reward.functions":
        if not change.also:
            function = {**changed["reward.functions"][0], leaf: change.value}
            changed["reward.functions"] = [function]
    else:
        changed[key] = change.value
    return plain, changed


def load(folder: Path, tree: Tree) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(recipe_toml({name: value for name, value in tree.items() if value is not None}))
    return load_recipe(path, inspect=True)


def left_by(folder: Path, tree: Tree, known: dict[str, Any]) -> Any:
    """What the run of a recipe leaves, but for times and the recipe itself; each recipe is run once."""
    name = recipe_toml({key: value for key, value in tree.items() if value is not None})
    if name not in known:
        run = folder / f"run-{len(known)}"
        launch.train(load(folder, tree), run_dir=run, command=["gspo", "train"])
        events = [
            {field: value for field, value in event.items() if field not in ("time", "seconds")}
            for event in read_events(run / "events.jsonl")
        ]
        saved = sorted((run / "checkpoints").rglob("*.safetensors"))
        known[name] = (events, {str(path.relative_to(run)): path.read_bytes() for path in saved})
    return known[name]


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return {}


def keys_seen(*where: str) -> list[str]:
    return [key for key, change in CHANGES.items() if change.seen in where]


@pytest.mark.parametrize("key", keys_seen("run"))
def test_the_run_is_another(key: str, place: Path, known: dict[str, Any]) -> None:
    plain, changed = (left_by(place, tree, known) for tree in both(key))
    assert plain != changed


@pytest.mark.parametrize("key", keys_seen("refused"))
def test_it_is_refused_before_the_run(key: str, place: Path) -> None:
    plain, changed = both(key)
    load(place, plain)
    with pytest.raises(InputError, match=r"weights\.gguf|no_such_task|at most 3 leave room"):
        load(place, changed)


@pytest.mark.parametrize("key", keys_seen("refused by the run"))
def test_it_is_refused_by_the_run(key: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cuda:97"):
        launch.train(load(place, both(key)[1]), run_dir=tmp_path / "run", command=["gspo", "train"])


# Parts.


def seen_by_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append((args[1:], kwargs))  # without self
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, watched)
    return calls


def run(recipe: Recipe, folder: Path, number: int) -> None:
    launch.train(recipe, run_dir=folder / f"watched-{number}", command=["gspo", "train"])


def threads(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    found = seen_by_calls(patch, torch, "set_num_threads")
    launch.build(recipe).close()
    return len(found)


def checkpointing(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    return policy_of(recipe, None).model.is_gradient_checkpointing


def slots(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    calls = seen_by_calls(patch, EmbeddedEngine, "__init__")
    launch.build(recipe).close()
    return [kwargs for _, kwargs in calls]


def calls(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    found = seen_by_calls(patch, EmbeddedEngine, "generate")
    run(recipe, folder, number)
    return len(found)


def engine(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    found = seen_by_calls(patch, RetryingEngine, "__init__")
    launch.build(recipe).close()
    return [kwargs for _, kwargs in found]


def verifiers(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    found = seen_by_calls(patch, VerifierPool, "__init__")
    launch.build(recipe).close()
    return found


def forwards(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    """Backward passes: one for each micro-batch."""
    found = seen_by_calls(patch, torch.Tensor, "backward")
    run(recipe, folder, number)
    return len(found)


def settings(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    return settings_of(recipe)


def history(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    """What follows from one time of going back."""
    once = History((Attempt(1, 1, 2, 2, ("an alarm",), "abandoned/attempt-1.jsonl"),))
    started = once.started(recipe, Progress(1, 2, {}, Bounds(1e-3, 2e-3), None, 0))
    return once.learning_rate(recipe), once.num_mini_batches(recipe), started.bounds


def cold_start(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    found = seen_by_calls(patch, CausalPolicy, "save")
    run(recipe, folder, number)
    return len(found)


def held_out(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    """What a random model says hardly depends on what it is asked, so it is looked at what is asked."""
    house = launch.build(recipe)
    house.close()
    return [(prompt.id, prompt.token_ids) for prompt in house.eval_prompts]


def calibration(recipe: Recipe, folder: Path, patch: pytest.MonkeyPatch, number: int) -> Any:
    """Of the few responses of such a run any share comes to the same bounds."""
    return calibration_of(recipe)


PARTS: dict[str, Callable[[Recipe, Path, pytest.MonkeyPatch, int], Any]] = {
    "threads": threads,
    "checkpointing": checkpointing,
    "slots": slots,
    "calls": calls,
    "engine": engine,
    "verifiers": verifiers,
    "forwards": forwards,
    "held-out prompts": held_out,
    "calibration": calibration,
    "settings": settings,
    "history": history,
    "cold start": cold_start,
}


@pytest.mark.parametrize("key", keys_seen(*PARTS))
def test_the_part_that_keeps_it_is_told(key: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = PARTS[CHANGES[key].seen]
    found = []
    for number, tree in enumerate(both(key)):
        with monkeypatch.context() as patch:
            found.append(part(load(place, tree), tmp_path, patch, number))
    assert found[0] != found[1]


def test_every_way_of_seeing_is_one_of_those_tested() -> None:
    assert {change.seen for change in CHANGES.values()} == {"run", "refused", "refused by the run", *PARTS}
