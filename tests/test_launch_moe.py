"""Whole runs of a mixture of experts, and every objective from a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo import launch
from gspo.config import load_recipe
from gspo.errors import ModelError
from gspo.events import read_events
from gspo.objectives.bundle import PAPER_BOUNDS
from gspo.report.charts import all_charts
from gspo.report.series import load_run
from tests.test_launch import BASE, LENGTHS, MOE

SHORT = ["--data.eval.num_prompts", "2", "--eval.num_samples", "1", "--train.learning_rate", "1e-2"]


def run(tmp_path: Path, *words: str, text: str = MOE) -> list[dict]:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    launch.train(load_recipe(recipe, [*LENGTHS, *SHORT, *words]), run_dir=tmp_path / "run", command=["gspo", "train"])
    return read_events(tmp_path / "run" / "events.jsonl")


@pytest.mark.parametrize(
    "words",
    [
        ["--moe.replay", "r2", "--train.old_logprobs", "recompute"],
        ["--moe.replay", "r3", "--moe.metrics", "all", "--model.gradient_checkpointing", "true"],
        ["--run.preset", "modern", "--objective.calibration_steps", "1"],
    ],
    ids=["r2", "r3", "modern"],
)
def test_replay_runs_from_a_recipe_and_drift_is_logged_and_drawn(tmp_path: Path, words: list[str]) -> None:
    events = run(tmp_path, *words)
    updates = [e["metrics"] for e in events if e["type"] == "update" and "moe/drift" in e["metrics"]]
    first = [e["metrics"] for e in events if e["type"] == "update" and e["mini_batch"] == 0]
    assert all(metrics["moe/drift"] == 0 for metrics in first)
    assert max(metrics["moe/drift"] for metrics in updates) > 0
    step = next(e["metrics"] for e in events if e["type"] == "step")
    assert step["moe/engine_drift"] == 0
    assert step["moe/drift"] > 0
    [chart] = [chart for chart in all_charts([load_run(tmp_path / "run")]) if chart.id == "routing_drift"]
    [trace] = chart.traces
    assert trace["type"] == "heatmap"
    assert trace["y"] == ["0", "1"]
    assert [row[0] for row in trace["z"]] == [0, 0]
    assert len(trace["x"]) == 4
    assert chart.key() == []


def test_a_dense_model_cannot_replay_unless_a_preset_said_so(tmp_path: Path) -> None:
    path = tmp_path / "model"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(BASE)
    launch.build(load_recipe(recipe)).policy.save(path)
    dense = BASE.replace('tiny = "qwen3"', f'path = "{path}"')
    dense = "\n".join(line for line in dense.splitlines() if not line.startswith("tiny_config"))
    with pytest.raises(ModelError, match="has no experts"):
        run(tmp_path, "--moe.replay", "r3", text=dense)
    events = run(tmp_path / ".", "--run.preset", "modern", "--objective.calibration_steps", "1", text=dense)
    assert not any(name.startswith("moe/") for e in events if e["type"] == "step" for name in e["metrics"])


@pytest.mark.parametrize(
    "objective", [name for name in PAPER_BOUNDS if name not in ("gspo", "gspo_token", "ppo", "pg")]
)
def test_every_variant_runs_with_r3_from_a_recipe(tmp_path: Path, objective: str) -> None:
    correction = "seq_prod" if objective == "gmpo" else "icepop"
    events = run(
        tmp_path, "--objective.name", objective, "--moe.replay", "r3", "--train.num_steps", "1",
        "--train.old_logprobs", "recompute", "--objective.correction.kind", correction,
    )  # fmt: skip
    [step] = [e for e in events if e["type"] == "step"]
    assert step["num_updates"] == 4
    assert step["metrics"]["correction/weight"] == pytest.approx(1.0, abs=1e-4)  # the engine is the trained module
