"""The terminal view: what is shown, live and as plain lines."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from gspo.events import read_events
from gspo.report.terminal import TerminalReporter
from tests.report.synthetic import write_run


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(events: list[dict[str, Any]], seconds_per_event: float = 1.0, live: bool = False) -> str:
    clock, out = Clock(), io.StringIO()
    with TerminalReporter(Console(file=out, width=200), live=live, clock=clock) as reporter:
        for event in events:
            clock.now += seconds_per_event if event["type"] in ("step", "sft") else 0.0
            reporter.on_event(event)
    return out.getvalue()


def events_of(tmp_path: Path, **options: Any) -> list[dict[str, Any]]:
    return read_events(write_run(tmp_path / "r", **options) / "events.jsonl")


def test_without_a_terminal_each_step_is_one_line(tmp_path: Path) -> None:
    lines = shown(events_of(tmp_path, num_steps=5)).splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/5", "2/5", "3/5", "4/5", "5/5"]
    for name in ("reward", "clipped", "log s", "length", "truncated", "no signal"):
        assert all(name in line for line in steps)
    assert lines[0] == "tiny-moe · gspo · bounds -0.003 / +0.004"
    assert sum(line.startswith("evaluation at step") for line in lines) == 6
    assert lines[-1].startswith("finished after")
    assert "\x1b" not in "".join(lines)


def test_time_left_follows_the_pace(tmp_path: Path) -> None:
    lines = [line for line in shown(events_of(tmp_path, num_steps=5), 30.0).splitlines() if line.startswith("step ")]
    assert "left" not in lines[0]  # one step has no pace yet
    assert lines[1].endswith("left 1 min 30 s")  # three steps of 30 s
    assert lines[-1].endswith("left 0.0 s")


def test_the_pace_of_the_cold_start_is_not_that_of_the_steps(tmp_path: Path) -> None:
    clock = Clock()
    reporter = TerminalReporter(Console(file=io.StringIO()), live=False, clock=clock)
    for event in events_of(tmp_path, num_steps=4, num_sft=20):
        clock.now += {"sft": 1.0, "step": 100.0}.get(event["type"], 0.0)
        reporter.on_event(event)
        if event["type"] == "step" and event["step"] == 1:
            assert reporter.seconds_left() is None
        if event["type"] == "step" and event["step"] == 2:
            assert reporter.seconds_left() == 200.0


def test_a_cold_start_prints_some_lines_and_not_every_update(tmp_path: Path) -> None:
    lines = shown(events_of(tmp_path, num_steps=0, num_sft=200)).splitlines()
    updates = [line for line in lines if line.startswith("supervised update")]
    assert 15 <= len(updates) <= 25
    assert "loss" in updates[0]


def test_what_must_not_be_missed_is_printed_in_either_mode(tmp_path: Path) -> None:
    events = [
        {"type": "audit", "findings": ["gold answer of prompt 3 earns 0"]},
        {"type": "warning", "message": "bounds never bind"},
        {"type": "calibration", "step": 5, "clip_low": 0.003, "clip_high": 0.004},
    ]
    for live in (False, True):
        text = shown(events, live=live)
        assert "audit: gold answer of prompt 3 earns 0" in text
        assert "warning: bounds never bind" in text
        assert "clip_low 0.003, clip_high 0.004" in text


def view(reporter: TerminalReporter, console: Console) -> str:
    with console.capture() as capture:
        console.print(reporter.render())
    return capture.get()


def test_the_live_view_shows_phase_progress_and_numbers(tmp_path: Path) -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), width=160)
    reporter = TerminalReporter(console, live=True, clock=clock)
    assert "step 0" in view(reporter, console)  # before anything has come
    events = events_of(tmp_path, num_steps=5)
    for event in events:
        clock.now += 10.0 if event["type"] == "step" else 0.0
        reporter.on_event(event)
        if event["type"] == "step" and event["step"] == 3:
            break
    reporter.on_phase("rollout", 4)
    clock.now += 7
    text = view(reporter, console)
    metrics = event["metrics"]
    for expected in (
        "step 3 of 5",
        "20.0 s left",
        "sampling responses (step 4) 7 s",
        f"{metrics['reward/mean']:.3f}",
        f"{metrics['clip_fraction/sequence']:.1%}",
        f"{metrics['clip_fraction/token_high']:.1%} high",
        f"{metrics['log_ratio/q95']:.1e}",
        "-0.003 to +0.004",
        f"{metrics['groups/constant']}/32 groups",
        f"{metrics['mismatch/mean_abs']:.1e}",
        "rollout",
        "pass@1",
    ):
        assert expected in text, expected


def test_events_with_missing_numbers_are_shown_as_dashes() -> None:
    event = {"type": "step", "step": 1, "seconds": {}, "metrics": {"reward/mean": None}}
    assert "reward -" in shown([event])
    console = Console(file=io.StringIO(), width=160)
    reporter = TerminalReporter(console, live=False)
    reporter.on_event(event)
    assert "step 1" in view(reporter, console)


def test_leaving_the_view_restores_the_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with TerminalReporter(console) as reporter:
        assert reporter.is_live
        reporter.on_event({"type": "start", "name": "x", "num_steps": 3})
        reporter.on_phase("rollout", 1)
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is visible again
