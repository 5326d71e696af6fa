"""Wrong recipes: each fault is one sentence that names the key, where it is, and what would work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gspo.cli import main
from gspo.config import load_recipe
from gspo.errors import ConfigError

#: (name, text after the minimal recipe, overrides, what the one sentence must contain)
WRONG = [
    ("typo in a key", "[train]\nnum_stps = 3", [], ["recipe.toml:6", "train.num_stps", "train.num_steps"]),
    ("typo of a foreign name", "[objective]\nepsilom_high = 4e-4", [], ["epsilon_high", "objective.clip_high"]),
    ("foreign name", "[objective]\nepsilon = 3e-4", [], ["recipe.toml:6", "objective.clip_low"]),
    ("foreign name elsewhere", "[train]\nnum_generations = 8", [], ["section [rollout]", "group_size"]),
    ("key of another section", "[train]\ngroup_size = 8", [], ["train.group_size", "belongs to section [rollout]"]),
    ("foreign key, wrong section", "[objective]\nadv_normalise = true", [], ["belongs to section [advantage]"]),
    ("unknown section", "[optimizer]\nlr = 1e-6", [], ["recipe.toml:5", "optimizer", "train.learning_rate"]),
    ("typo in a section", "[trian]\nnum_steps = 3", [], ["trian", "[train]"]),
    ("nothing like it", "[eval]\nxyzzy = 3", [], ["eval.xyzzy", "num_samples"]),
    ("text for a number", '[train]\nlearning_rate = "1e-6"', [], ["train.learning_rate", "a number greater than 0"]),
    ("float for an int", "[train]\nnum_steps = 1e3", [], ["train.num_steps = 1000.0", "whole number"]),
    ("zero steps", "[train]\nnum_steps = 0", [], ["train.num_steps = 0", "greater than 0", "100"]),
    ("bool for an int", "[train]\nnum_steps = true", [], ["train.num_steps = true", "whole number"]),
    ("int for a bool", "[reward]\naudit = 1", [], ["reward.audit = 1", "true or false"]),
    ("infinite", "[objective]\nkl_coefficient = inf", [], ["objective.kl_coefficient = inf", "at least 0"]),
    ("not one of", '[objective]\nname = "gsop"', [], ["objective.name", '"gspo"', '"grpo"']),
    ("list item", "[eval]\nk = [1, 0]", [], ["eval.k[1] = 0", "list of whole numbers greater than 0"]),
    ("short list", "[train]\nbetas = [0.9]", [], ["train.betas[1] is missing", "list of 2 numbers from 0 to 1"]),
    ("not a list", "[rollout]\nstop_strings = 3", [], ["rollout.stop_strings = 3", "a list of texts"]),
    ("section that is none", "eval = 5", [], ["data.eval = 5", "must be a table"]),
    ("reward without name", "[[reward.functions]]\nweight = 1.0", [], ["reward.functions[0].name", "missing"]),
    ("rewards that are none", '[reward]\nfunctions = ["math"]', [], ["reward.functions", "list of tables"]),
    ("greedy rollouts", "[rollout]\ntemperature = 0", [], ["rollout.temperature = 0", "greedy"]),
    ("group of one", "[rollout]\ngroup_size = 1", [], ["recipe.toml:6", "a group needs at least 2 completions"]),
    ("random drop", "[train]\nrandom_drop = [0.0, 0.5]", [], ["train.random_drop", "2 values", "num_mini_batches = 4"]),
    ("more updates than rows", "[train]\nnum_mini_batches = 300", [], ["train.num_mini_batches", "256 sequences"]),
    ("fewer prompts than a step", "", ["--data.num_prompts", "5"], ["data.num_prompts", "5 is fewer", "32"]),
    ("bounds without explicit", "[objective]\nclip_low = 1e-3", [], ["objective.clip_low", "no effect", "explicit"]),
    (
        "explicit without bounds",
        '[objective]\nclip = "explicit"\nclip_low = 1e-3',
        [],
        ["objective.clip_high", "needed"],
    ),
    ("target without calibrated", "[objective]\nclip_target = 0.15", [], ["objective.clip_target", "calibrated"]),
    ("steps without calibrated", "[objective]\ncalibration_steps = 5", [], ["calibration_steps", "calibrated"]),
    ("target of 0", '[objective]\nclip = "calibrated"\nclip_target = 0.0', [], ["clip_target", "between 0 and 1"]),
    ("token mean", '[objective]\nunit = "token"', [], ["objective.unit", "grpo"]),
    (
        "calibrated token ratio",
        '[objective]\nname = "grpo"\nclip = "calibrated"',
        [],
        ["objective.clip", "token ratio"],
    ),
    ("clip of pg", '[objective]\nname = "pg"\nclip = "paper"', [], ["objective.clip", "does not clip"]),
    ("kl estimator alone", '[objective]\nkl_estimator = "k1"', [], ["kl_estimator", "objective.kl_coefficient"]),
    ("script alone", '[rollout]\nscript = "pyproject.toml"', [], ["rollout.script", 'engine = "scripted"']),
    ("scripted without script", '[rollout]\nengine = "scripted"', [], ["rollout.engine", "rollout.script"]),
    ("floor alone", '[advantage]\nscale = "none"\nstd_floor = 1e-4', [], ["advantage.std_floor", "advantage.scale"]),
    ("refills alone", "[train]\nmax_refills = 2", [], ["train.max_refills", "groups_without_signal"]),
    (
        "mismatch bound alone",
        '[train]\nold_logprobs = "recompute"\nmismatch_bound = 1e-5',
        [],
        ["mismatch_bound", "auto"],
    ),
    ("two micro-batch limits", "[train]\nmicro_batch_size = 4\nmicro_batch_tokens = 512", [], ["keep one of the two"]),
    ("beta of 1", "[train]\nbetas = [0.9, 1.0]", [], ["train.betas", "below 1"]),
    ("keep_last alone", "[checkpoint]\nevery = 0\nkeep_last = 3", [], ["checkpoint.keep_last", "checkpoint.every"]),
    ("isolate alone", "[reward]\nisolate = true", [], ["reward.isolate", "module:function"]),
    ("memory limit alone", "[reward]\nmemory_limit_mb = 100", [], ["reward.memory_limit_mb", "reward.isolate"]),
    ("keep_best alone", "[checkpoint]\nkeep_best = 1", [], ["checkpoint.keep_best", "eval.every"]),
    ("in a row alone", '[guard]\nnon_finite = "stop"\nmax_non_finite = 2', [], ["guard.max_non_finite", "skip"]),
    ("k above samples", "[eval]\nk = [1, 8]", [], ["eval.k", "pass@8", "at least 8"]),
    ("audit size alone", "[reward]\naudit = false\naudit_num_prompts = 3", [], ["audit_num_prompts", "audit = false"]),
    ("no such reward", '[[reward.functions]]\nname = "mth"', [], ["reward.functions[0].name", '"math"']),
    ("reward twice", '[[reward.functions]]\nname = "task"\n[[reward.functions]]\nname = "task"', [], ["2 times"]),
    ("weights of 0", '[[reward.functions]]\nname = "task"\nweight = 0', [], ["every weight is 0"]),
    ("kind of a built-in", '[[reward.functions]]\nname = "task"\nkind = "verl"', [], ["reward.functions[0].kind"]),
    (
        "workers without verifier",
        '[reward]\nnum_workers = 3\n[[reward.functions]]\nname = "json:loads"',
        [],
        ["reward.num_workers", "built-in"],
    ),
    ("answer column of a task", '[reward]\nanswer_column = "gold"', [], ["reward.answer_column", '"task"']),
    ("sft without source", "[sft]\nnum_steps = 3", [], ["sft.path", "sft.task"]),
    ("sft column alone", '[sft]\ntask = "arithmetic:addition"\nresponse_column = "r"', [], ["sft.response_column"]),
    ("sft eval_every alone", '[sft]\ntask = "arithmetic:addition"\neval_every = 5', [], ["sft.eval_every"]),
    ("no device", "[run]\ndevice = 'gpu'", [], ["run.device", '"cuda"']),
    ("model twice", "", ["--model.path", "Qwen/Qwen3-0.6B"], ["model.tiny", "model.path", "both set"]),
    ("no model", "", ["--model.tiny", "none"], ["neither model.path nor model.tiny"]),
    ("data twice", "", ["--data.path", "."], ["data.path and data.task are both set"]),
    ("no data", "", ["--data.task", "none"], ["neither data.path nor data.task"]),
    ("no such data", "", ["--data.eval.path", "/no/such.jsonl"], ["--data.eval.path", "/no/such.jsonl"]),
    ("no task", "", ["--data.task", "addition"], ["--data.task", "arithmetic:addition"]),
    ("prompt column of a task", "", ["--data.prompt_column", "q"], ["data.prompt_column", "data.path"]),
    ("template alone", '[data.eval]\nchat_template = "never"\ntemplate_options = {a = 1}', [], ["template_options"]),
    ("pairs without task", '[sft]\npath = "{pairs}"\nnum_pairs = 5', [], ["sft.num_pairs", "sft.task"]),
    ("system prompt without template", 'chat_template = "never"\nsystem_prompt = "s"', [], ["data.system_prompt"]),
    ("gguf of a tiny model", "", ["--model.gguf_file", "x.gguf"], ["model.gguf_file", "model.path"]),
    ("override without value", "", ["--train.num_steps"], ["--train.num_steps", "no value"]),
    ("override of a wrong key", "", ["--train.nmu_steps", "3"], ["--train.nmu_steps", "train.num_steps"]),
    ("override without section", "", ["--lr", "3"], ["--lr", "section [train]", "learning_rate"]),
    ("override of wrong type", "", ["--train.num_steps", "many"], ['train.num_steps = "many"', "whole number"]),
    ("override inside a value", "", ["--data.task.x", "3"], ["--data.task.x", "data.task is not a table"]),
]


@pytest.mark.parametrize(("text", "overrides", "parts"), [pytest.param(*case[1:], id=case[0]) for case in WRONG])
def test_a_wrong_recipe_is_one_sentence_and_status_2(
    text: str,
    overrides: list[str],
    parts: list[str],
    write: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1+1=", "response": "2"}\n')
    assert main(["check", str(write(text.replace("{pairs}", str(pairs)))), *overrides]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    for part in parts:
        assert part in err


def test_all_faults_are_in_one_report_in_the_order_of_the_file(write: Callable[..., Path]) -> None:
    path = write(
        "[rollout]\ngroup_size = 1\nmax_token = 5\n[objective]\nclip_target = 0.2\n[train]\nnum_steps = 0\n"
        '[[reward.functions]]\nname = "maths"\nweight = "a"\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, ["--eval.k", "[9]"])
    first, *faults = str(caught.value).splitlines()
    assert first == f"{path} has 7 faults:"
    starts = [
        f"{path}:6: rollout.group_size",
        f"{path}:7: rollout.max_token:",
        f"{path}:9: objective.clip_target",
        f"{path}:11: train.num_steps",
        f"{path}:13: reward.functions[0].name",
        f"{path}:14: reward.functions[0].weight",
        "--eval.k: eval.k",
    ]
    assert len(faults) == len(starts)
    for fault, start in zip(faults, starts, strict=True):
        assert fault.strip().startswith(start)


def test_a_misspelt_key_is_not_also_reported_as_missing(write: Callable[..., Path]) -> None:
    path = write('[objective]\nclip = "explicit"\nclip_low = 3e-4\nclip_hihg = 4e-4\n')
    with pytest.raises(
        ConfigError, match=r"^\S+:8: objective\.clip_hihg: unknown key; did you mean objective\.clip_high\?$"
    ):
        load_recipe(path)


def test_a_fault_in_data_is_not_repeated_for_the_copy_in_data_eval(write: Callable[..., Path]) -> None:
    path = write("task_options = 3\n[data.eval]\nnum_prompts = 7\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert str(caught.value).count("task_options") == 1


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"[model\n", "recipe.toml:1: not valid TOML at column"),
        (b'[model]\ntiny = "qwen3\n', "recipe.toml:2: not valid TOML"),
        (b"a = 1\na = 2\n", "recipe.toml:2: not valid TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a = \x00", "not valid TOML"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    assert main(["train", str(path)]) == 2
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1


def test_missing_file_names_those_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.toml").touch()
    assert main(["train", str(tmp_path / "tny.toml")]) == 2
    assert "no such recipe file" in (err := capsys.readouterr().err)
    assert "tiny.toml" in err
    assert main(["train", str(tmp_path)]) == 2
    assert "cannot be read as a recipe" in capsys.readouterr().err
