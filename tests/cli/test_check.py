"""What ``gspo check`` prints."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from gspo.cli import main
from gspo.cli.check import counted, readable
from gspo.config import load_recipe


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """Overrides that replace the tiny model by a directory that nothing has to be built for."""
    directory = tmp_path / "model"
    directory.mkdir()
    config = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 11}
    (directory / "config.json").write_text(json.dumps(config))
    return ["--model.tiny", "none", "--model.path", str(directory)]


def check(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["check", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_resolved_recipe_loads_again(
    recipe_file: Path, model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*model, "--train.num_steps", "7"]
    out = check(capsys, str(recipe_file), *words)
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(out[: out.index("# batch\n")])
    assert tomllib.loads(resolved.read_text())["train"] == {"num_steps": 7}
    assert load_recipe(resolved) == load_recipe(recipe_file, words)


def test_batch_and_schedule(recipe_file: Path, model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rollout.prompts_per_step", "6", "--rollout.group_size", "4", "--train.micro_batch_size", "4"]
    words += ["--train.num_steps", "10", "--train.num_mini_batches", "2", "--data.num_prompts", "20"]
    out = check(capsys, str(recipe_file), *model, *words)
    assert "6 prompts x 4 responses = 24 sequences per step" in out
    assert "2 updates per step of 12 sequences" in out
    assert "3 micro-batches per update" in out  # 12 sequences in fours
    assert "3 steps per epoch of 20 prompts; 2 prompts are left over" in out  # 20 = 3 x 6 + 2
    assert "10 steps x 2 updates = 20 updates" in out
    assert "240 responses sampled" in out
    assert "ratio kept in 1 - 0.0003 .. 1 + 0.0004 (paper)" in out
    assert "warnings\n  none" in out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--objective.name", "pg"], "pg does not clip"),
        (["--objective.clip", "calibrated"], "frozen after 5 steps, so that 15% of responses"),
        (
            ["--objective.clip=explicit", "--objective.clip_low=1e-3", "--objective.clip_high=2e-3"],
            "1 - 0.001 .. 1 + 0.002",
        ),
        (["--train.groups_without_signal", "drop"], "400 updates at most"),
        (
            ["--sft.task=arithmetic:addition", "--sft.stop_at_pass=0.4"],
            "200 updates of 64 pairs, fewer once pass@1 reaches 0.4",
        ),
        (["--rollout.prompts_per_step=3"], "6 sequences"),  # 3 x 8 in 4 updates
        (["--rollout.prompts_per_step=3", "--rollout.group_size=3"], "4 updates per step of 2 or 3 sequences"),
        (["--model.path", "Qwen/Qwen3-0.6B"], 'not known: "Qwen/Qwen3-0.6B" is not on this disk'),
        ([], "no safetensors file"),
        (["--objective.name", "ppo"], "warning: objective.name: ppo trains no critic"),
    ],
)
def test_lines(
    recipe_file: Path, model: list[str], capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    assert part in check(capsys, str(recipe_file), *model, *words)


def test_lines_of_a_jsonl_file_are_counted(
    recipe_file: Path, model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n\n' * 70)
    words = ["--data.task", "none", "--data.path", str(data), "--reward.functions", '[{name = "number"}]']
    assert "2 steps per epoch of 70 prompts; 6 prompts" in check(capsys, str(recipe_file), *model, *words)
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 5)
    assert main(["check", str(recipe_file), *model, *words]) == 2
    assert "has 5 prompts, fewer than rollout.prompts_per_step = 32" in capsys.readouterr().err


def test_a_tiny_model_is_counted_exactly(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gspo.policy.tiny import tiny_model

    options = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48}
    built, _ = tiny_model("qwen3", options)
    count = sum(parameter.numel() for parameter in built.parameters())
    words = [f"--model.tiny_config.{name}={value}" for name, value in options.items()]
    out = check(capsys, str(recipe_file), *words)
    assert f"{count:,} parameters" in out
    assert f"{'optimizer':<12}{readable(8 * count):>12}" in out
    assert "prompts are taken to have 256 tokens" in out


def test_a_tiny_config_that_cannot_work_is_status_2(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(recipe_file), "--model.tiny_config.hiden_size=64"]) == 2
    assert "hidden_size" in capsys.readouterr().err


def test_sft_only(tmp_path: Path, model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sft.toml"
    path.write_text('[model]\ntiny = "qwen3"\n[sft]\ntask = "arithmetic:addition"\nnum_steps = 30\n')
    out = check(capsys, str(path), *model)
    assert "30 updates of 64 pairs" in out
    assert "good for gspo sft only" in out
    assert "# batch\n" not in out


def test_words() -> None:
    assert counted(1, "step") == "1 step"
    assert counted(2000, "step") == "2,000 steps"
    assert [readable(size) for size in (5, 1536, 3 << 20, 5 << 30)] == ["5 B", "1.5 KiB", "3.0 MiB", "5.0 GiB"]
    assert readable(5 << 50) == "5120.0 TiB"
