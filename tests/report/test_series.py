"""Reading a run directory into curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.errors import RunDirectoryError
from gspo.events import RunDirectory
from gspo.report.series import load_run, load_runs
from tests.report.synthetic import write_run


def test_curves_are_what_was_written(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "r") as run, run.event_writer() as events:
        events.write("start", name="mine", objective="gspo")
        for step, (reward, loss) in enumerate([(0.1, 1.0), (float("nan"), 2.0), (0.3, 3.0)], 1):
            for mini_batch in (0, 1):
                events.write(
                    "update",
                    step=step,
                    update=2 * step + mini_batch - 1,
                    mini_batch=mini_batch,
                    metrics={"loss": loss + mini_batch, "clip_fraction/sequence": 0.1 * step * mini_batch},
                )
            seconds = {"rollout": 2.0, "update": 1.0, "total": 3.5}
            metrics = {"reward/mean": reward}
            events.write("step", step=step, num_updates=2, policy_version=2 * step, seconds=seconds, metrics=metrics)
    data = load_run(tmp_path / "r")
    assert data.label == "mine"
    assert data.clips_sequences
    assert data.end is None
    reward = data.step_curve("reward/mean")
    assert (reward.x, reward.y) == ([1, 2, 3], [0.1, None, 0.3])
    # a metric that only updates carry: mean over the updates of each step
    assert data.step_curve("loss").y == [1.5, 2.5, 3.5]
    assert data.update_curve("loss").x == [1, 2, 3, 4, 5, 6]
    by_index = data.mini_batch_curve("clip_fraction/sequence")
    assert (by_index.x, by_index.y) == ([0, 1], [0, pytest.approx((0.1 + 0.2 + 0.3) / 3)])
    assert data.phases() == ["rollout", "update"]
    assert data.phase_seconds("rollout").y == [2.0, 2.0, 2.0]
    assert not data.step_curve("entropy")


def test_evaluations_by_name_and_the_one_that_counts(tmp_path: Path) -> None:
    data = load_run(write_run(tmp_path / "r", num_steps=4, num_sft=40))
    assert list(data.evaluations()) == ["sft", "held_out"]
    assert [event["step"] for event in data.evaluations()["sft"]] == [20, 40]
    assert [event["step"] for event in data.main_evaluation()] == [0, 1, 2, 3, 4]
    assert len(data.sft_curve("loss").x) == 40


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, name="same", num_steps=0) for name in ("a", "b")]
    labels = [run.label for run in load_runs([*paths, paths[0]])]
    assert labels == ["same (a)", "same (b)", "same (a) #3"]


def test_a_path_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        load_run(tmp_path)
