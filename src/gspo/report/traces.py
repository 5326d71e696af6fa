"""The pieces that charts are made of: lines, bands, error bars and axes as plotly's JSON.

Colours of text and grid are the page's; here a run has one colour, the same in every chart. A page of one run tells
several curves of a chart apart by colour, a page of several by dash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo.report.series import Curve, RunData

#: Of what belongs to no run, such as bounds.
NEUTRAL = "#7f7f8c"
#: Readable on white and on near-black.
COLOURS = ("#3f74d8", "#e0702f", "#2f9e74", "#b65ca8", "#c39a22", "#4aa5c0", "#d2506a", "#6b7fb0")
DASHES = ("solid", "dot", "dash", "dashdot", "longdash")
PHASE_COLOURS = ("#3f74d8", "#c39a22", "#4aa5c0", "#e0702f", "#2f9e74", "#b65ca8", NEUTRAL)

Trace = dict[str, Any]
Scale = Literal["linear", "log", "fraction", "log_fraction"]


@dataclass(frozen=True)
class Style:
    """Look of one curve. ``run`` is None on a page of one run."""

    colour: str
    dash: str
    kind: str
    run: str | None = None

    @property
    def meta(self) -> dict[str, str | None]:
        """What the key of a chart goes by."""
        return {"run": self.run, "kind": self.kind}

    @property
    def name(self) -> str:
        return self.kind if self.run is None else f"{self.run}, {self.kind}"


@dataclass(frozen=True)
class KeyEntry:
    """One entry of a chart's key: all traces whose meta says ``value`` under ``field``."""

    field: Literal["run", "kind"]
    value: str
    colour: str | None  # None: stands for curves of several colours
    dash: str | None  # None: an area


def colour_of(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def style_of(runs: Sequence[RunData], index: int, number: int, name: str) -> Style:
    """Look of curve ``number`` of run ``index``."""
    if len(runs) == 1:
        return Style(COLOURS[number % len(COLOURS)], "solid", name)
    return Style(colour_of(index), DASHES[number % len(DASHES)], name, runs[index].label)


def key_entries(traces: Sequence[Trace]) -> list[KeyEntry]:
    """The runs, each by its colour, then the kinds of curve where there are several."""
    shown = [trace for trace in traces if not _is_lower_edge(trace)]
    runs = {trace["meta"]["run"]: trace["line"]["color"] for trace in shown if trace["meta"]["run"] is not None}
    entries = [KeyEntry("run", run, colour, "solid") for run, colour in runs.items()]
    kinds = {trace["meta"]["kind"]: trace for trace in reversed(shown)}
    if len(kinds) > 1:
        for kind in dict.fromkeys(trace["meta"]["kind"] for trace in shown):
            area = kinds[kind]["type"] == "bar" or "fill" in kinds[kind]
            dash = None if area else kinds[kind]["line"]["dash"]
            entries.append(KeyEntry("kind", kind, None if runs else _colour(kinds[kind]), dash))
    return entries


def _is_lower_edge(trace: Trace) -> bool:
    return trace["type"] == "scatter" and "fill" not in trace and not trace["line"]["width"]


def _colour(trace: Trace) -> str:
    return str(trace["marker"]["color"] if trace["type"] == "bar" else trace.get("fillcolor") or trace["line"]["color"])


def line(curve: Curve, style: Style, mode: str | None = None) -> list[Trace]:
    """No trace for an empty curve; a lone point is drawn as a marker."""
    if not curve:
        return []
    return [
        {
            "type": "scatter",
            "mode": mode or ("lines" if len(curve.known) > 1 else "markers"),
            "name": style.name,
            "meta": style.meta,
            "x": curve.x,
            "y": curve.y,
            "line": {"color": style.colour, "dash": style.dash, "width": 2},
            "marker": {"color": style.colour, "size": 7},
        }
    ]


def band(low: Curve, high: Curve, style: Style, kind: str, opacity: float = 0.18) -> list[Trace]:
    """The area between two curves of the same steps, in the colour of ``style``."""
    if low.x != high.x:
        return []
    rows = [(x, a, b) for x, a, b in zip(low.x, low.y, high.y, strict=True) if a is not None and b is not None]
    if not rows:
        return []
    shared: Trace = {
        "type": "scatter",
        "mode": "lines",
        "meta": {"run": style.run, "kind": kind},
        "x": [x for x, _, _ in rows],
        "line": {"width": 0, "color": style.colour},
        "hoverinfo": "skip",
    }
    filled = {"fill": "tonexty", "fillcolor": _transparent(style.colour, opacity)}
    return [shared | {"y": [a for _, a, _ in rows]}, shared | {"y": [b for _, _, b in rows]} | filled]


def bound_lines(run: RunData, style: Style) -> list[Trace]:
    """log(1 - clip_low) and log(1 + clip_high), step by step where they were logged, else from the start."""
    traces: list[Trace] = []
    for metric, sign in (("clip_low", -1.0), ("clip_high", 1.0)):
        curve = run.step_curve(metric)
        constant = run.start.get(metric)
        if not curve and constant is not None and run.num_steps_done:
            steps = run.step_curve("log_ratio/q50").x
            curve = Curve(steps, [float(constant)] * len(steps))
        values = [math.log1p(sign * y) if y is not None and y < 1 else None for y in curve.y]
        drawn = line(Curve(curve.x, values), style)
        for trace in drawn:
            trace["mode"] = "lines"
            trace["line"] |= {"width": 1.5, "shape": "hv"}
        traces += drawn
    return traces


def evaluation_traces(events: Sequence[dict[str, Any]], style: Style, with_k: bool) -> list[Trace]:
    if not events:
        return []
    xs = [float(event["step"]) for event in events]
    values = [float(event["metrics"]["pass@1"]) for event in events]
    low = [_or(event["metrics"].get("pass@1/low"), y) for event, y in zip(events, values, strict=True)]
    high = [_or(event["metrics"].get("pass@1/high"), y) for event, y in zip(events, values, strict=True)]
    traces = line(Curve(xs, list(values)), style, mode="lines+markers")
    traces[0]["error_y"] = {
        "type": "data",
        "symmetric": False,
        "array": [b - y for b, y in zip(high, values, strict=True)],
        "arrayminus": [y - a for a, y in zip(low, values, strict=True)],
        "color": style.colour,
        "thickness": 1.5,
        "width": 4,
    }
    names = {
        k for event in events for k in event["metrics"] if k.startswith("pass@") and "/" not in k and k != "pass@1"
    }
    for number, name in enumerate(sorted(names, key=lambda k: int(k[5:])) if with_k else (), 1):
        curve = Curve(xs, [event["metrics"].get(name) for event in events])
        traces += line(curve, Style(COLOURS[number % len(COLOURS)], "dot", name), mode="lines+markers")
    return traces


def kind_lines(runs: Sequence[RunData], kinds: Sequence[tuple[str, str]], log: bool = False) -> list[Trace]:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        for number, (metric, name) in enumerate(kinds):
            curve = run.step_curve(metric)
            traces += line(without_zeros(curve) if log else curve, style_of(runs, index, number, name))
    return traces


def update_lines(runs: Sequence[RunData], metric: str, log: bool = False) -> list[Trace]:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        curve = run.update_curve(metric)
        for trace in line(without_zeros(curve) if log else curve, style_of(runs, index, 0, metric)):
            trace["line"]["width"] = 1.3
            traces.append(trace)
    return traces


def without_zeros(curve: Curve) -> Curve:
    """Zeros have no place on a log axis: gaps."""
    return Curve(curve.x, [y if y is not None and y > 0 else None for y in curve.y])


def share_of(top: Curve, bottom: Curve) -> Curve:
    if top.x != bottom.x:
        return Curve()
    return Curve(top.x, [a / b if a is not None and b else None for a, b in zip(top.y, bottom.y, strict=True)])


def spread(mean: Curve, std: Curve) -> tuple[Curve, Curve]:
    pairs = list(zip(mean.y, std.y, strict=True))
    low = [m - s if m is not None and s is not None else None for m, s in pairs]
    high = [m + s if m is not None and s is not None else None for m, s in pairs]
    return Curve(mean.x, low), Curve(mean.x, high)


def _or(value: float | None, other: float) -> float:
    return other if value is None else float(value)


def confidence_text(runs: Sequence[RunData]) -> str:
    levels = {event.get("confidence", 0.95) for run in runs for event in run.of_type("evaluation")}
    return f"{100 * levels.pop():g} %" if len(levels) == 1 else "confidence"


def _transparent(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def shade(low: float, high: float) -> dict[str, Any]:
    """A pale horizontal stripe over the whole width."""
    return {
        "type": "rect",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": low,
        "y1": high,
        "fillcolor": "rgba(47,158,116,0.10)",
        "line": {"width": 0},
        "layer": "below",
    }


def drift_map(layers: Sequence[str], curves: Sequence[Curve]) -> Trace:
    """Rows are layers, columns update indices, colours shares."""
    columns = sorted({x for curve in curves for x in curve.x})
    rows = [dict(zip(curve.x, curve.y, strict=True)) for curve in curves]
    return {
        "type": "heatmap",
        "name": "drift",
        "x": columns,
        "y": list(layers),
        "z": [[row.get(column) for column in columns] for row in rows],
        "zmin": 0,
        "colorscale": [[0, "#eef2fb"], [0.5, COLOURS[0]], [1, "#1b2a4f"]],
        "colorbar": {"tickformat": ".0~%", "thickness": 12},
        "hovertemplate": "layer %{y}, update %{x}: %{z:.1%}<extra></extra>",
        "meta": {"run": None, "kind": "drift"},
    }


def axis(scale: Scale, traces: Sequence[Trace]) -> dict[str, Any]:
    """Axis options; a log axis only where the values span more than a factor of 20."""
    values = [y for trace in traces for y in trace.get("y", ()) if isinstance(y, float) and y > 0]
    wide = bool(values) and max(values) > 20 * min(values)
    if scale == "fraction":
        return {"rangemode": "tozero", "tickformat": ".0~%"}
    if scale == "linear" or not wide:
        return {"rangemode": "tozero", "tickformat": ".1~%"} if scale == "log_fraction" else {}
    decades = math.log10(max(values) / min(values))
    format_ = {"tickformat": "~%"} if scale == "log_fraction" else {"exponentformat": "power"}
    if decades >= 2.5:
        return {"type": "log", "dtick": 1, **format_}
    return {"type": "log", "dtick": "D2", **({"tickformat": ".1~g"} | format_)}
