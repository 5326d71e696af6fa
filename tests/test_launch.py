"""Whole runs on models of a few thousand parameters: what is in the run directory, and that it is the same twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gspo import launch
from gspo.cli import main
from gspo.config import Recipe, load_recipe
from gspo.errors import RewardError, RunError
from gspo.events import read_events

SMALL = (
    "{ hidden_size = 32, num_hidden_layers = 2, intermediate_size = 64, "
    "num_attention_heads = 2, num_key_value_heads = 1, head_dim = 16"
)
BASE = f"""
[model]
tiny = "qwen3"
tiny_config = {SMALL} }}
[data]
task = "arithmetic:addition"
num_prompts = 20
[data.eval]
num_prompts = 5
[rollout]
prompts_per_step = 4
group_size = 4
max_new_tokens = 6
[train]
num_steps = 2
learning_rate = 1e-3
[eval]
num_samples = 2
"""
MOE = BASE.replace('"qwen3"', '"qwen3_moe"').replace(SMALL, SMALL + ", moe_intermediate_size = 16, num_experts = 4")


@pytest.fixture
def recipe(tmp_path: Path):
    def load(*words: str, text: str = BASE) -> Recipe:
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return load_recipe(path, words)

    return load


#: A reward with spread whatever a random model says.
LENGTHS = ["--reward.functions", '[{name = "tests.test_launch:even_length"}]', "--reward.audit", "false"]


def even_length(completions, completion_ids):
    return [float(len(ids) % 2 == 0) + 0.01 * (sum(ids) % 7) for ids in completion_ids]


def run(recipe: Recipe, path: Path):
    launch.train(recipe, run_dir=path, command=["gspo", "train"])
    return read_events(path / "events.jsonl")


def weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def test_a_run_writes_everything_it_measured(recipe, tmp_path):
    events = run(recipe(*LENGTHS, "--eval.every", "1"), tmp_path / "run")
    kinds = [event["type"] for event in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert events[-1]["status"] == "finished"
    assert [e["step"] for e in events if e["type"] == "evaluation"] == [0, 1, 2]
    assert [e["step"] for e in events if e["type"] == "step"] == [1, 2]
    updates = [e for e in events if e["type"] == "update"]
    assert [(e["step"], e["mini_batch"], e["update"]) for e in updates] == [
        (1, 0, 1), (1, 1, 2), (1, 2, 3), (1, 3, 4), (2, 0, 5), (2, 1, 6), (2, 2, 7), (2, 3, 8),
    ]  # fmt: skip
    step = next(e for e in events if e["type"] == "step")
    assert {"rollout", "reward", "old_logprobs", "update", "total"} <= set(step["seconds"])
    assert step["metrics"]["groups/total"] == 4
    assert step["metrics"]["mismatch/mean_abs"] < 1e-5
    samples = next(e for e in events if e["type"] == "samples")["samples"]
    assert {"prompt", "answer", "reward", "ratio", "advantage", "stop_reason"} <= set(samples[0])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_updates"] == 8
    assert {"before", "after", "seconds", "gain_interval"} <= set(summary)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["command"] == ["gspo", "train"]
    assert {"torch", "transformers", "gspo", "python"} <= set(info["versions"])
    # The resolved recipe loads again and is the same tree.
    assert load_recipe(tmp_path / "run" / "recipe.toml") == recipe(*LENGTHS, "--eval.every", "1")


@pytest.mark.parametrize("text", [BASE, MOE], ids=["dense", "moe"])
def test_the_first_update_of_each_batch_is_on_policy(recipe, tmp_path, text):
    events = run(recipe(*LENGTHS, text=text), tmp_path / "run")
    for event in events:
        if event["type"] == "update" and event["mini_batch"] == 0:
            assert event["metrics"]["log_ratio/abs_mean"] < 1e-5
            assert event["metrics"]["clip_fraction/sequence"] == 0
        if event["type"] == "update" and event["mini_batch"] == 3:
            assert event["metrics"]["log_ratio/abs_mean"] > 1e-5


@pytest.mark.parametrize("text", [BASE, MOE], ids=["dense", "moe"])
def test_the_same_recipe_gives_the_same_numbers_bit_for_bit(recipe, tmp_path, text):
    def numbers(events):
        kept = ("update", "evaluation", "samples")
        return [{k: v for k, v in e.items() if k != "time"} for e in events if e["type"] in kept]

    first = run(recipe(*LENGTHS, text=text), tmp_path / "a")
    second = run(recipe(*LENGTHS, text=text), tmp_path / "b")
    other = run(recipe(*LENGTHS, "--run.seed", "1", text=text), tmp_path / "c")
    assert numbers(first) == numbers(second)
    assert numbers(first) != numbers(other)
    a, b = (weights(tmp_path / name / "checkpoints" / "step-000002") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("objective", ["gspo", "gspo_token", "grpo", "ppo", "pg"])
def test_every_objective_runs_from_a_recipe(recipe, tmp_path, objective):
    events = run(recipe(*LENGTHS, "--objective.name", objective), tmp_path / "run")
    assert [e["num_updates"] for e in events if e["type"] == "step"] == [4, 4]


def test_kl_to_the_reference_starts_at_zero_and_grows(recipe, tmp_path):
    events = run(recipe(*LENGTHS, "--objective.kl_coefficient", "0.1"), tmp_path / "run")
    kl = [e["metrics"]["kl/reference"] for e in events if e["type"] == "update"]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-6


def test_calibrated_bounds_are_measured_logged_and_frozen(recipe, tmp_path):
    words = ["--objective.clip", "calibrated", "--objective.calibration_steps", "2", "--train.num_steps", "4"]
    events = run(recipe(*LENGTHS, *words), tmp_path / "run")
    (calibration,) = (e for e in events if e["type"] == "calibration")
    assert calibration["step"] == 2
    low = [e["metrics"]["clip_low"] for e in events if e["type"] == "step"]
    # Six tokens against 6400: the first step starts from the paper's bound times sqrt(6400 / 6).
    assert low[0] == pytest.approx(3e-4 * (6400 / 6) ** 0.5, rel=0.2)
    assert low[2] == low[3] == calibration["clip_low"]


def test_groups_without_signal_can_be_dropped_or_refilled(recipe, tmp_path):
    constant = ["--reward.functions", '[{name = "tests.test_launch:by_prompt"}]', "--reward.audit", "false"]
    kept = run(recipe(*constant), tmp_path / "keep")
    dropped = run(recipe(*constant, "--train.groups_without_signal", "drop"), tmp_path / "drop")
    steps = [e["metrics"] for e in dropped if e["type"] == "step"]
    assert steps[0]["groups/constant"] == steps[0]["groups/dropped"] == 4
    assert steps[0]["skipped_updates"] == 4  # nothing is left, and nothing is updated
    assert [e["metrics"]["skipped_updates"] for e in kept if e["type"] == "step"] == [0, 0]
    mixed = ["--reward.functions", '[{name = "tests.test_launch:half_constant"}]', "--reward.audit", "false"]
    refilled = run(recipe(*mixed, "--train.groups_without_signal", "refill"), tmp_path / "refill")
    first = next(e["metrics"] for e in refilled if e["type"] == "step")
    assert first["groups/refilled"] > 0
    assert first["groups/total"] == 4


def by_prompt(prompts, completions):
    return [float(len(str(prompt)) % 3) for prompt in prompts]


def half_constant(prompts, completion_ids):
    """Signal for about half of the prompts only."""
    return [
        float(sum(ids) % 2) if sum(map(ord, str(prompt))) % 2 else 0.0
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def test_cold_start_comes_before_gspo_and_is_kept(recipe, tmp_path):
    text = BASE + '[sft]\ntask = "arithmetic:addition"\nnum_steps = 3\nbatch_size = 4\nlearning_rate = 1e-3\n'
    events = run(recipe(*LENGTHS, text=text), tmp_path / "run")
    kinds = [event["type"] for event in events]
    assert kinds.count("sft") == 3
    assert kinds.index("sft") < kinds.index("step")
    assert (tmp_path / "run" / "checkpoints" / "sft" / "model.safetensors").exists()


def test_a_reward_that_is_always_the_same_stops_before_step_1(recipe, tmp_path):
    words = ["--reward.functions", '[{name = "tests.test_launch:always_one"}]']
    with pytest.raises(RewardError, match="audit failed before step 1"):
        run(recipe(*words), tmp_path / "run")
    assert [e["type"] for e in read_events(tmp_path / "run" / "events.jsonl")][-1] == "end"
    run(recipe(*LENGTHS), tmp_path / "run")  # nothing was trained, so the directory is free


def always_one(completions):
    return [1.0] * len(completions)


def test_a_reward_that_fails_in_the_middle_leaves_a_checkpoint(recipe, tmp_path):
    words = ["--reward.functions", '[{name = "tests.test_launch:dies_later"}]', "--reward.audit", "false"]
    CALLS.clear()
    with pytest.raises(RewardError, match="dies_later"):
        run(recipe(*words, "--train.num_steps", "5"), tmp_path / "run")
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert events[-1]["status"] == "failed"
    saved = [e for e in events if e["type"] == "checkpoint"]
    assert (tmp_path / "run" / saved[-1]["path"] / "model.safetensors").exists()


CALLS: list[int] = []


def dies_later(completions, completion_ids):
    CALLS.append(1)
    if len(CALLS) == 4:  # one evaluation, then steps
        raise KeyError("column gone")
    return even_length(completions, completion_ids)


def test_scripted_completions_are_trained_on_with_recomputed_logprobs(recipe, tmp_path):
    from gspo.envs.tasks import make_task

    base = recipe(*LENGTHS)
    ids = [
        row["id"]
        for split in ("train", "eval")
        for row in make_task("arithmetic:addition", {}, seed=base.run.seed, split=split, num=20).rows
    ]
    script = tmp_path / "script.jsonl"
    script.write_text("".join(json.dumps({"prompt_id": i, "completions": ["1", "22", "333", "4"]}) + "\n" for i in ids))
    words = [*LENGTHS, "--rollout.engine", "scripted", "--rollout.script", str(script)]
    events = run(recipe(*words), tmp_path / "run")
    samples = next(e for e in events if e["type"] == "samples")["samples"]
    assert {s["answer"] for s in samples} <= {"1", "22", "333", "4"}
    step = next(e for e in events if e["type"] == "step")
    assert step["metrics"]["mismatch/mean_abs"] is None  # the script had no log-probs: recomputed, and said so
    with pytest.raises(RunError, match="mismatch"):
        run(recipe(*words, "--train.old_logprobs", "engine"), tmp_path / "engine")


def test_evaluate_reads_a_checkpoint(recipe, tmp_path):
    run(recipe(*LENGTHS), tmp_path / "run")
    result = launch.evaluate(
        recipe(*LENGTHS), model=str(tmp_path / "run/checkpoints/step-000002"), output=tmp_path / "eval.json"
    )
    assert json.loads(json.dumps(result)) == json.loads((tmp_path / "eval.json").read_text())
    assert 0 <= result["metrics"]["pass@1"] <= 1
    assert result["num_prompts"] == 5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model.tiny", "none", "--model.path", "."], "not a model directory"),
        (["--rollout.group_size", "1"], "at least 2 completions"),
        (["--rollout.max_new_tokens", "5000"], "context"),
        (["--reward.functions", '[{name = "tests.test_launch:nothing"}]'], "nothing"),
        (["--reward.functions", '[{name = "tests.test_launch:too_few"}]', "--reward.audit", "true"], "values for"),
        (["--reward.functions", '[{name = "tests.test_launch:raises"}]'], "ZeroDivisionError"),
        (["--data.task", "none", "--data.path", "EMPTY", *LENGTHS[:2]], "empty"),
        (["--data.task", "none", "--data.path", "CHAT", *LENGTHS[:2]], "prompt"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(recipe, tmp_path, capsys, words, sentence):
    recipe()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "chat.jsonl").write_text('{"question": "1+1="}\n')
    words = [
        w.replace("EMPTY", str(tmp_path / "empty.jsonl")).replace("CHAT", str(tmp_path / "chat.jsonl")) for w in words
    ]
    status = main(["train", str(tmp_path / "recipe.toml"), "--run-dir", str(tmp_path / "run"), *words])
    error = capsys.readouterr().err
    assert status == 2
    assert sentence in error
    assert "Traceback" not in error


def too_few(completions):
    return [1.0]


def raises(completions):
    return [1 / 0]


def test_a_run_directory_in_use_is_refused(recipe, tmp_path, capsys):
    from gspo.events import RunDirectory

    recipe()
    with RunDirectory.create(tmp_path / "run"):
        status = main(["train", str(tmp_path / "recipe.toml"), "--run-dir", str(tmp_path / "run")])
    assert status == 2
    assert "in use" in capsys.readouterr().err
