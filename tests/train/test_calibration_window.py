"""Whole runs: the measuring window of calibrated bounds opens after the warm-up of the learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo import launch
from gspo.config import load_recipe
from gspo.config.check import check_recipe
from gspo.events import read_events
from tests.test_launch import BASE, LENGTHS

CALIBRATED = ["--objective.clip", "calibrated", "--objective.calibration_steps", "2", "--train.num_steps", "6"]


def bounds_by_step(tmp_path: Path, *words: str) -> tuple[list[float], list[dict[str, Any]]]:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(BASE)
    loaded = load_recipe(recipe, [*LENGTHS, *CALIBRATED, "--eval.num_samples", "1", *words])
    launch.train(loaded, run_dir=tmp_path / "run", command=["gspo", "train"])
    events = read_events(tmp_path / "run" / "events.jsonl")
    return (
        [event["metrics"]["clip_low"] for event in events if event["type"] == "step"],
        [event for event in events if event["type"] == "calibration"],
    )


@pytest.mark.parametrize(("warmup", "last_at_first_bounds"), [(0, 1), (6, 3), (8, 3)])
def test_first_bounds_stand_until_a_step_without_warm_up_was_measured(
    tmp_path: Path, warmup: int, last_at_first_bounds: int
) -> None:
    # 4 updates a step: with 6 or 8 of warm-up step 3 is the first that begins at the full rate, and step 4 the first
    # whose bounds follow from a measured step. Two steps are measured, so the bounds freeze one step later.
    bounds, calibrations = bounds_by_step(tmp_path, "--train.warmup_steps", str(warmup))
    first = bounds[0]
    assert all(bound == first for bound in bounds[:last_at_first_bounds])
    assert bounds[last_at_first_bounds] != first
    [calibration] = calibrations
    assert calibration["step"] == last_at_first_bounds + 1
    assert bounds[last_at_first_bounds + 1 :] == [calibration["clip_low"]] * (len(bounds) - last_at_first_bounds - 1)


def test_a_window_that_does_not_fit_behind_the_warm_up_is_said_beforehand(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(BASE)
    words = [*LENGTHS, *CALIBRATED, "--train.warmup_steps", "13"]
    [finding] = [f for f in check_recipe(load_recipe(recipe, words)) if f.key == "objective.calibration_steps"]
    assert finding.severity == "warning"
    assert "after 4 of learning-rate warm-up" in finding.message
