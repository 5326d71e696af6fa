"""Rules that span keys: warnings, and that what is fine is left alone (errors are in test_wrong_recipes)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gspo.config import Recipe, check_recipe, load_recipe
from gspo.config.effects import is_set
from gspo.config.schema import ModelConfig, TrainDataConfig
from gspo.errors import ConfigError

EXPLICIT = ["objective.clip=explicit"]

WARNINGS = [
    (["objective.name=ppo"], "objective.name", "no critic"),
    (["train.num_mini_batches=1"], "train.num_mini_batches", "always 1"),
    (["train.num_mini_batches=1", "train.old_logprobs=recompute"], "train.num_mini_batches", "always 1"),
    (["objective.name=pg"], "train.num_mini_batches", "off-policy"),
    ([*EXPLICIT, "objective.clip_low=0.2", "objective.clip_high=4e-4"], "objective.clip_low", "never binds"),
    (
        [*EXPLICIT, "objective.name=grpo", "objective.clip_low=0.2", "objective.clip_high=4e-4"],
        "objective.clip_high",
        "token ratio",
    ),
    (["objective.clip=calibrated", "train.num_steps=5"], "objective.calibration_steps", "never do"),
    (["model.dtype=bfloat16"], "model.dtype", "float32"),
    (["train.warmup_steps=400"], "train.warmup_steps", "400 updates"),  # 100 steps x 4 updates = 400
    (["eval.every=101"], "eval.every", "train.num_steps = 100"),
    (["checkpoint.every=101"], "checkpoint.every", "train.num_steps = 100"),
    (["eval.temperature=0"], "eval.temperature", "greedy"),
]


@pytest.mark.parametrize(("overrides", "key", "part"), WARNINGS, ids=[f"{case[1]}-{case[2]}" for case in WARNINGS])
def test_what_is_doubtful_is_a_warning_that_names_its_key(
    recipe: Callable[..., Recipe], overrides: list[str], key: str, part: str
) -> None:
    findings = check_recipe(recipe(*overrides))
    assert [(finding.severity, finding.key) for finding in findings] == [("warning", key)]
    assert part in findings[0].message


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [*EXPLICIT, "objective.clip_low=3e-3", "objective.clip_high=4e-3"],
        ["objective.clip=calibrated", "objective.clip_target=0.2", "objective.calibration_steps=3"],
        ["objective.name=grpo", "objective.unit=token"],
        ["objective.name=grpo", *EXPLICIT, "objective.clip_low=0.2", "objective.clip_high=0.28"],
        ["objective.name=pg", "train.num_mini_batches=1"],
        ["objective.kl_coefficient=0.01", "objective.kl_estimator=k1"],
        ["advantage.scale=batch_std", "advantage.std_floor=1e-3"],
        ["train.groups_without_signal=refill", "train.max_refills=2"],
        ["train.mismatch_bound=1e-4"],
        ["train.mismatch_bound=1e-4", "train.old_logprobs=engine"],
        ["train.warmup_steps=399"],
        ["model.dtype=bfloat16", "train.learning_rate=1e-3"],
        ["checkpoint.every=10", "checkpoint.keep_last=1"],
        ["eval.k=[1, 4]"],
        ["eval.temperature=0", "eval.num_samples=1"],
        ["run.device=cuda:1"],
        ["data.eval.num_prompts=64"],
        ["sft.task=arithmetic:addition", "sft.stop_at_pass=0.4", "sft.eval_every=10"],
        ["model.tiny=none", "model.path=Qwen/Qwen3-0.6B", "model.gguf_file=q.gguf"],
        ["data.num_prompts=32"],
    ],
)
def test_what_is_meant_is_left_alone(recipe: Callable[..., Recipe], overrides: list[str]) -> None:
    assert check_recipe(recipe(*overrides)) == []


def test_remote_code_is_warned_about(recipe: Callable[..., Recipe]) -> None:
    found = check_recipe(recipe("model.tiny=none", "model.path=Qwen/Qwen3-0.6B", "model.trust_remote_code=true"))
    assert [finding.key for finding in found] == ["model.trust_remote_code"]


def test_default_values_written_out_count_as_set(recipe: Callable[..., Recipe]) -> None:
    assert is_set(recipe("train.num_steps=100"), "train.num_steps")
    assert not is_set(recipe(), "train.num_steps")
    assert not is_set(recipe(), "sft.eval_every")
    with pytest.raises(ConfigError, match=r"train\.max_refills"):
        recipe("train.max_refills=3")


def test_errors_come_first() -> None:
    recipe = Recipe(
        model=ModelConfig(tiny="qwen3", trust_remote_code=True, dtype="bfloat16"),
        data=TrainDataConfig(task="arithmetic:addition"),
    )
    severities = [finding.severity for finding in check_recipe(recipe)]
    assert severities == ["error", "warning"]


def test_file_data_needs_a_reward(write: Callable[..., Path], tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    file = ["--data.task", "none", "--data.path", str(data)]
    with pytest.raises(ConfigError, match=r"reward.functions: data of a file needs a reward"):
        load_recipe(write(""), file)
    with pytest.raises(ConfigError, match='"task" is the verifier of a generated task'):
        load_recipe(write(""), [*file, "--reward.functions", '[{name = "task"}]'])
    assert load_recipe(write(""), [*file, "--reward.functions", '[{name = "number"}]']).data.path == str(data)
    assert load_recipe(
        write('[reward]\nanswer_column = "gold"\n'), [*file, "--reward.functions", '[{name = "number"}]']
    )


def test_held_out_prompts_of_a_file(write: Callable[..., Path], tmp_path: Path) -> None:
    data, other = tmp_path / "d.jsonl", tmp_path / "e.jsonl"
    for file in (data, other):
        file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    words = ["--data.task", "none", "--data.path", str(data), "--reward.functions", '[{name = "m.py:f"}]']
    found = check_recipe(load_recipe(write(""), words))
    assert [(finding.severity, finding.key) for finding in found] == [("warning", "data.eval")]
    with pytest.raises(ConfigError, match="no held-out prompts"):
        load_recipe(write(""), words, command="eval")
    with pytest.raises(ConfigError, match=r"eval\.every: 5 has no effect because there are no held-out prompts"):
        load_recipe(write(""), [*words, "--eval.every", "5"])
    with pytest.raises(ConfigError, match=r"sft\.stop_at_pass: 0\.4 has no effect"):
        load_recipe(write(""), [*words, "--sft.task", "arithmetic:addition", "--sft.stop_at_pass", "0.4"])
    # Out of the training file: how many must be said, since they leave the training.
    with pytest.raises(ConfigError, match=r"data\.eval\.num_prompts: is needed"):
        load_recipe(write(""), [*words, "--data.eval.seed", "1"])
    assert check_recipe(load_recipe(write(""), [*words, "--data.eval.num_prompts", "1"])) == []
    apart = load_recipe(write(""), [*words, "--data.eval.path", str(other), "--eval.every", "5"], command="eval")
    assert check_recipe(apart, "eval") == []


def test_warnings_are_about_what_the_command_does(recipe: Callable[..., Recipe]) -> None:
    doubtful = recipe(
        "objective.name=ppo", "eval.temperature=0", "model.dtype=bfloat16", "sft.task=arithmetic:addition",
        "sft.num_steps=5",
    )  # fmt: skip
    warned = {command: {f.key for f in check_recipe(doubtful, command)} for command in ("train", "sft", "eval")}  # type: ignore[arg-type]
    assert warned["train"] == {"objective.name", "eval.temperature", "model.dtype", "sft.warmup_steps"}
    assert warned["eval"] == {"eval.temperature"}
    assert warned["sft"] == {"sft.warmup_steps"}


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_of_the_repository_are_right(path: Path) -> None:
    """Whatever model they name: it need not be on this disk."""
    words = ["--model.path", "none", "--model.gguf_file", "none", "--model.trust_remote_code", "none"]
    tiny = "tiny_config" in path.read_text()
    load_recipe(path, [] if tiny else [*words, "--model.tiny", "qwen3"])


def test_default_number_of_prompts_is_that_of_the_tasks() -> None:
    from gspo.config.batch import DEFAULT_TASK_PROMPTS
    from gspo.envs.tasks import DEFAULT_NUM_PROMPTS

    assert DEFAULT_TASK_PROMPTS == DEFAULT_NUM_PROMPTS


def test_model_paths(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    def load(path: str, *more: str) -> Recipe:
        return recipe("model.tiny=none", f"model.path={path}", *more)

    with pytest.raises(ConfigError, match=r"not a model directory: it has no config\.json"):
        load(str(tmp_path))
    with pytest.raises(ConfigError, match=r"it has no a\.gguf"):
        load(str(tmp_path), "model.gguf_file=a.gguf")
    with pytest.raises(ConfigError, match="neither a directory nor a hub name"):
        load("./no/such/model")
    file = tmp_path / "weights.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match="is a file; give the directory"):
        load(str(file))
    (tmp_path / "config.json").write_text("{}")
    assert load(str(tmp_path)).model.path == str(tmp_path)
