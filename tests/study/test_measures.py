"""Measures on run directories whose events are written here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from gspo.errors import ConfigError
from gspo.events import EventWriter
from gspo.study.measures import MEASURES, SERIES, Measured, normal_clip_fraction, read_measured


@pytest.fixture
def measured(tmp_path: Path):
    """A run with the given rewards and pass rates by step, and gradient norms by update (two a step)."""

    def make(
        rewards: Sequence[float] = (), passes: Sequence[float] = (), norms: Sequence[float] = (), failed: bool = False
    ) -> Measured:
        run = tmp_path / "cell" / "run"
        run.mkdir(parents=True)
        with EventWriter(run / "events.jsonl") as events:
            for step, value in enumerate(rewards, 1):
                bounds = {"clip_low": 0.1, "clip_high": 0.2}
                metrics = {"reward/mean": value, **bounds}
                events.write("step", step=step, num_updates=2, policy_version=2 * step, seconds={}, metrics=metrics)
            for number, norm in enumerate(norms):
                step, index = number // 2 + 1, number % 2
                metrics = {
                    "grad_norm": norm,
                    "log_ratio/std": 0.1 * index,
                    "moe/drift/layer_00": 0.1 * index,
                    "moe/drift/layer_01": 0.3 * index,
                }
                events.write("update", step=step, update=number + 1, mini_batch=index, metrics=metrics)
            for step, value in enumerate(passes):
                rest = {"num_prompts": 4, "num_samples": 1, "confidence": 0.95, "outcomes": []}
                events.write("evaluation", step=step, name="held_out", metrics={"pass@1": value}, **rest)
        return read_measured(tmp_path / "cell", failed)

    return make


def value(name: str, run: Measured, **options):
    return MEASURES[name](run, options)


def test_a_metric_is_reduced_as_asked(measured):
    run = measured(rewards=[0.1, 0.3, 0.8])
    assert value("metric", run, metric="reward/mean") == pytest.approx(0.4)
    assert value("metric", run, metric="reward/mean", last=1) == 0.8
    assert value("metric", run, metric="reward/mean", first=2) == pytest.approx(0.2)
    assert value("metric", run, metric="reward/mean", reduce="max") == 0.8
    assert value("metric", run, metric="entropy") is None


def test_updates_are_told_by_mini_batch(measured):
    run = measured(norms=[1.0, 3.0, 5.0, 7.0])
    assert value("metric", run, metric="grad_norm", level="update", mini_batch=1) == 5.0
    assert value("metric", run, metric="grad_norm", level="update") == 4.0


def test_a_level_that_does_not_exist_is_refused(measured):
    with pytest.raises(ConfigError, match='"step", "update" or "evaluation"'):
        value("metric", measured(rewards=[1.0]), metric="reward/mean", level="epoch")


@pytest.mark.parametrize(("passes", "expected"), [([0.4, 0.6, 0.19], 1.0), ([0.4, 0.1, 0.2], 0.0), ([], None)])
def test_collapsed_compares_the_end_with_the_beginning(measured, passes, expected):
    options = {"metric": "pass@1", "level": "evaluation", "begin": 1, "end": 1, "share": 0.5}
    assert value("collapsed", measured(passes=passes), **options) == expected


def test_a_failed_run_has_collapsed_whatever_it_logged(measured):
    options = {"metric": "pass@1", "level": "evaluation", "begin": 1, "end": 1, "share": 0.5}
    assert value("collapsed", measured(passes=[0.4, 0.9], failed=True), **options) == 1.0
    assert value("failed", Measured(failed=True)) == 1.0
    assert value("failed", Measured()) == 0.0


def test_a_cell_that_wrote_nothing_has_no_values(tmp_path):
    empty = read_measured(tmp_path, failed=True)
    assert value("metric", empty, metric="reward/mean") is None
    assert all(SERIES[name](empty, {"metric": "x", "key": "x", "mini_batch": 1}) is None for name in SERIES)


def test_slide_is_the_way_down_from_the_highest_point(measured):
    assert value("slide", measured(rewards=[0.2, 0.9, 0.4]), metric="reward/mean") == pytest.approx(0.5)


def test_slide_averages_its_window(measured):
    run = measured(rewards=[0.2, 0.4, 0.6, 0.0])
    assert value("slide", run, metric="reward/mean", window=2) == pytest.approx(0.2)  # 0.5 at best, 0.3 at the end


def test_spikes_are_counted_against_the_median_before_them(measured):
    run = measured(norms=[1.0, 1.0, 1.0, 1.0, 3.5, 1.0, 2.9, 1.0])
    assert value("spikes", run, factor=3.0, window=4) == 25.0  # one of four: 3.5 > 3 * 1; 2.9 is none
    assert value("spikes", run, factor=3.0, window=20) is None


def test_log10_has_a_floor(measured):
    run = measured(rewards=[0.0])
    assert value("log10", run, metric="reward/mean", floor=1e-4) == pytest.approx(-4)


def test_a_difference_is_of_two_metrics(measured):
    run = measured(rewards=[0.1, 0.7])
    of, minus = {"metric": "reward/mean", "last": 1}, {"metric": "reward/mean", "first": 1}
    assert value("difference", run, of=of, minus=minus) == pytest.approx(0.6)
    assert value("difference", run, of=of, minus={"metric": "entropy"}) is None


def test_records_are_read_by_key(tmp_path):
    written = {"scalars": {"score": 0.5, "gone": None}, "series": {"path": {"x": [1, 2], "y": [0.5, None]}}}
    (tmp_path / "records.json").write_text(json.dumps(written))
    run = read_measured(tmp_path, failed=False)
    assert value("record", run, key="score") == 0.5
    assert value("record", run, key="gone") is None
    assert value("record", run, key="never") is None
    assert SERIES["record"](run, {"key": "path"}).y == (0.5, None)


def test_series_of_steps_mini_batches_layers_and_evaluations(measured):
    run = measured(rewards=[0.1, 0.2], passes=[0.3, 0.5], norms=[1.0, 3.0, 5.0, 7.0])
    assert SERIES["steps"](run, {"metric": "reward/mean"}).y == (0.1, 0.2)
    assert SERIES["mini_batches"](run, {"metric": "grad_norm"}).y == (3.0, 5.0)
    assert SERIES["evaluations"](run, {"metric": "pass@1"}).x == (0.0, 1.0)
    assert SERIES["layers"](run, {"metric": "moe/drift", "mini_batch": 1}).y == (0.1, 0.3)


def test_the_predicted_clip_fraction_is_the_normal_tails(measured):
    predicted = SERIES["predicted_clip"](measured(rewards=[0.1, 0.2], norms=[1.0, 1.0, 1.0, 1.0]), {})

    def tail(z: float) -> float:
        return math.erfc(z / math.sqrt(2)) / 2

    # Half of the responses have a positive advantage and are cut above, the other half below.
    expected = (tail(math.log(1.2) / 0.1) + tail(-math.log(0.9) / 0.1)) / 2
    assert predicted.x == (0.0, 1.0)
    assert predicted.y == (0.0, pytest.approx(expected))


def test_bounds_that_are_never_reached_clip_nothing_and_none_clips_half():
    assert normal_clip_fraction(1e-6, 0.2, 0.2) == pytest.approx(0.0, abs=1e-12)
    assert normal_clip_fraction(1e6, 0.2, 0.2) == pytest.approx(0.5, abs=1e-6)
    assert normal_clip_fraction(1.0, 1.0, 0.2) < 0.25  # a lower bound of 1 - 1 = 0 is never crossed
