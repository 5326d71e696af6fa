"""The final numbers of a run as short texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo.report.series import Curve, RunData


@dataclass(frozen=True)
class Value:
    """A number as it is shown, with a note below it; empty texts where nothing is known."""

    text: str = "–"
    note: str = ""


def before_after(run: RunData) -> tuple[Value, Value]:
    """The first and the last evaluation on held-out prompts; the same twice where there is only one."""
    events = run.main_evaluation()
    if not events:
        return Value(), Value()
    return _pass_rate(events[0]), _pass_rate(events[-1])


def change(run: RunData) -> Value:
    """Last minus first pass@1; with a paired interval where the run has computed one."""
    events = run.main_evaluation()
    if len(events) < 2:
        return Value()
    metrics: Mapping[str, Any] = events[-1]["metrics"]
    points = 100 * (metrics["pass@1"] - events[0]["metrics"]["pass@1"])
    low, high, p_value = (metrics.get(f"difference/{name}") for name in ("low", "high", "p_value"))
    note = "percentage points"
    if low is not None and high is not None:
        note = f"{100 * low:+.1f} to {100 * high:+.1f}"
        note += f", p = {p_value:.2g}" if p_value is not None else ""
    return Value(f"{points:+.1f}", note)


def progress(run: RunData) -> Value:
    """Steps done and how the run ended."""
    planned = run.start.get("num_steps")
    done = run.num_steps_done
    updates = len(run.of_type("update"))
    if not done and run.of_type("sft"):
        return Value(str(len(run.of_type("sft"))), f"supervised updates; {status(run)}")
    text = f"{done} of {planned}" if planned else str(done)
    return Value(text, f"steps, {updates} updates; {status(run)}")


def status(run: RunData) -> str:
    return str(run.end["status"]) if run.end else "has not ended"


def duration(run: RunData) -> Value:
    """Wall-clock time, from the end event or from the times of the events."""
    events = run.log.events
    if not events:
        return Value()
    total = run.end["seconds"] if run.end else events[-1]["time"] - events[0]["time"]
    return Value(duration_text(float(total)))


def last_reward(run: RunData) -> Value:
    return _mean_of_last(run.step_curve("reward/mean"), "{:.3f}", "last {} steps")


def clipping(run: RunData) -> Value:
    return _mean_of_last(run.step_curve("clip_fraction/sequence"), "{:.1f} %", "last {} steps", 100.0)


def objective(run: RunData) -> Value:
    """Name and the bounds in force at the end."""
    start = run.start
    if run.only_supervised:
        return Value("supervised")
    if not start.get("objective"):
        return Value()
    low, high = (_last(run.step_curve(name), start.get(name)) for name in ("clip_low", "clip_high"))
    if low is None or high is None:
        return Value(str(start["objective"]), "no clipping")
    return Value(str(start["objective"]), f"ratio in [1 − {low:.3g}, 1 + {high:.3g}]")


def duration_text(seconds: float) -> str:
    """
    >>> duration_text(9.24), duration_text(131), duration_text(7380)
    ('9.2 s', '2 min 11 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _pass_rate(event: Mapping[str, Any]) -> Value:
    metrics = event["metrics"]
    low, high = metrics.get("pass@1/low"), metrics.get("pass@1/high")
    note = f"{100 * low:.1f} to {100 * high:.1f}" if low is not None and high is not None else ""
    return Value(f"{100 * metrics['pass@1']:.1f} %", note)


def _last(curve: Curve, otherwise: float | None) -> float | None:
    return curve.known[-1] if curve else otherwise


def _mean_of_last(curve: Curve, form: str, note: str, factor: float = 1.0) -> Value:
    values = curve.known[-10:]
    if not values:
        return Value()
    return Value(form.format(factor * sum(values) / len(values)), note.format(len(values)))
