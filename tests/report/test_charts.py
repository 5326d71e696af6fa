"""Figures: right numbers, valid for plotly, one colour per run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gspo.report.charts import Chart, all_charts
from gspo.report.series import load_run, load_runs
from gspo.report.traces import COLOURS, key_entries
from tests.report.synthetic import write_run


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chart]:
    path = write_run(tmp_path_factory.mktemp("one") / "r", num_steps=6, num_sft=40)
    return {chart.id: chart for chart in all_charts([load_run(path)])}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chart]:
    place = tmp_path_factory.mktemp("two")
    paths = [
        write_run(place / "a", name="A", num_steps=6),
        write_run(place / "b", name="B", num_steps=4, objective="grpo", clip=(0.2, 0.27)),
    ]
    return {chart.id: chart for chart in all_charts(load_runs(paths))}


def test_every_chart_is_there_and_titled(one: dict[str, Chart]) -> None:
    assert set(one) == {
        "reward",
        "evaluation",
        "clip_fraction",
        "log_ratio",
        "clip_by_mini_batch",
        "divergence",
        "length",
        "shares",
        "grad_norm",
        "entropy",
        "loss",
        "learning_rate",
        "seconds",
        "sft_loss",
        "sft_evaluation",
    }
    for chart in one.values():
        assert chart.title
        assert chart.caption
        assert chart.x_title
        assert chart.y_title


def test_plotly_accepts_every_figure(one: dict[str, Chart], two: dict[str, Chart]) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for chart in (*one.values(), *two.values()):
        figure = chart.figure()
        json.dumps(figure, allow_nan=False)
        graph_objects.Figure({"data": figure["traces"], "layout": figure["layout"]})  # raises on an unknown property


def test_bounds_are_drawn_in_the_units_of_log_s(one: dict[str, Chart]) -> None:
    low, high = [trace for trace in one["log_ratio"].traces if trace["meta"]["kind"] == "bounds"]
    assert low["y"] == [pytest.approx(math.log(1 - 3e-3))] * 6
    assert high["y"] == [pytest.approx(math.log(1 + 4e-3))] * 6


def test_bounds_of_a_token_ratio_are_not_drawn_against_responses(two: dict[str, Chart]) -> None:
    owners = {t["meta"]["run"] for t in two["log_ratio"].traces if t["meta"]["kind"] == "bounds"}
    assert owners == {"A"}


def test_intervals_are_the_error_bars(one: dict[str, Chart], tmp_path: Path) -> None:
    data = load_run(write_run(tmp_path / "r", num_steps=6, num_sft=40))
    first = data.main_evaluation()[0]["metrics"]
    trace = one["evaluation"].traces[0]
    assert trace["y"][0] == first["pass@1"]
    assert trace["y"][0] - trace["error_y"]["arrayminus"][0] == pytest.approx(first["pass@1/low"])
    assert trace["y"][0] + trace["error_y"]["array"][0] == pytest.approx(first["pass@1/high"])


def test_a_run_keeps_its_colour_in_every_chart(two: dict[str, Chart]) -> None:
    found = {
        (trace["meta"]["run"], trace["line"]["color"])
        for chart in two.values()
        for trace in chart.traces
        if trace["type"] == "scatter"
    }
    assert found == {("A", COLOURS[0]), ("B", COLOURS[1])}


def test_the_key_names_runs_by_colour_and_kinds_by_dash(two: dict[str, Chart]) -> None:
    entries = [(entry.field, entry.value, entry.colour, entry.dash) for entry in two["clip_fraction"].key()]
    assert entries == [
        ("run", "A", COLOURS[0], "solid"),
        ("run", "B", COLOURS[1], "solid"),
        ("kind", "responses", None, "solid"),
        ("kind", "tokens", None, "dot"),
    ]
    assert [entry.field for entry in two["reward"].key()] == ["run", "run"]  # one kind needs no entry
    assert key_entries([]) == []


def test_zeros_are_gaps_on_a_log_axis(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", num_steps=3)
    text = (path / "events.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    next(e for e in lines if e["type"] == "step")["metrics"]["clip_fraction/sequence_low"] = 0.0
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chart = next(chart for chart in all_charts([load_run(path)]) if chart.id == "clip_fraction")
    assert [value is None for value in chart.traces[0]["y"]] == [True, False, False]


def test_nothing_logged_draws_nothing(tmp_path: Path) -> None:
    assert all_charts([load_run(write_run(tmp_path / "r", num_steps=0))]) == []
