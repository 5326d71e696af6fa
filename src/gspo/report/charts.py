"""The charts of the report as plain plotly figures: ``{"traces": [...], "layout": {...}}`` made of JSON's types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gspo.report.series import RunData
from gspo.report.traces import (
    COLOURS,
    DASHES,
    NEUTRAL,
    PHASE_COLOURS,
    KeyEntry,
    Scale,
    Style,
    Trace,
    axis,
    band,
    bound_lines,
    confidence_text,
    drift_map,
    evaluation_traces,
    key_entries,
    kind_lines,
    line,
    shade,
    share_of,
    spread,
    style_of,
    update_lines,
    without_zeros,
)

STEP = "step (rollout batch)"
UPDATE = "update (optimizer step)"


@dataclass(frozen=True)
class Chart:
    """One card of the page."""

    id: str
    section: str
    title: str  # what is drawn; the text below it says what a healthy run looks like
    caption: str  # how to read it
    traces: list[Trace]
    x_title: str
    y_title: str
    scale: Scale = "linear"
    layout: dict[str, Any] = field(default_factory=dict)

    def key(self) -> list[KeyEntry]:
        return key_entries([trace for trace in self.traces if trace["type"] != "heatmap"])

    def figure(self) -> dict[str, Any]:
        """Plotly's traces and layout."""
        layout: dict[str, Any] = {
            "xaxis": {"title": {"text": self.x_title}, "rangemode": "normal"},
            "yaxis": {"title": {"text": self.y_title}, **axis(self.scale, self.traces)},
            "showlegend": False,
        }
        for key, value in self.layout.items():
            layout[key] = {**layout[key], **value} if isinstance(layout.get(key), dict) else value
        return {"traces": self.traces, "layout": layout}


def all_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Every chart that has something to show, in the order of the page."""
    makers = (
        reward,
        evaluation,
        clip_fractions,
        log_ratio_band,
        clip_by_mini_batch,
        divergence,
        routing_drift,
        lengths,
        shares,
        gradient_norm,
        entropy,
        loss,
        learning_rate,
        seconds,
        sft_loss,
        sft_evaluation,
    )
    return [chart for chart in (maker(runs) for maker in makers) if chart.traces]


def reward(runs: Sequence[RunData]) -> Chart:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        mean, std = run.step_curve("reward/mean"), run.step_curve("reward/std")
        if len(runs) == 1 and std.x == mean.x:
            low, high = spread(mean, std)
            traces += band(low, high, style_of(runs, index, 0, "mean"), "± 1 standard deviation over responses")
        traces += line(mean, style_of(runs, index, 0, "mean"))
    return Chart(
        "reward",
        "Result",
        "Reward in training",
        "Mean reward of the responses sampled in each step; it should rise.",
        traces,
        STEP,
        "reward",
    )


def evaluation(runs: Sequence[RunData]) -> Chart:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        held_out = {name: events for name, events in run.evaluations().items() if name != "sft"}
        for number, (name, events) in enumerate(held_out.items()):
            shown = "pass@1" if len(held_out) == 1 else f"{name} pass@1"
            traces += evaluation_traces(events, style_of(runs, index, number, shown), with_k=len(runs) == 1)
    return Chart(
        "evaluation",
        "Result",
        "Held-out prompts: before, during, after",
        f"Share of responses that pass, with a {confidence_text(runs)} interval over prompts.",
        traces,
        STEP,
        "pass@1" if len(runs) > 1 else "pass@k",
        "fraction",
    )


def clip_fractions(runs: Sequence[RunData]) -> Chart:
    kinds = (
        ("clip_fraction/sequence_low", "responses, low"),
        ("clip_fraction/sequence_high", "responses, high"),
        ("clip_fraction/token_low", "tokens, low"),
        ("clip_fraction/token_high", "tokens, high"),
    )
    if len(runs) > 1:
        kinds = (("clip_fraction/sequence", "responses"), ("clip_fraction/token", "tokens"))  # type: ignore[assignment]
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        for number, (metric, name) in enumerate(kinds):
            curve = without_zeros(run.step_curve(metric))
            if len(runs) > 1:
                traces += line(curve, style_of(runs, index, number, name))
            else:
                traces += line(curve, Style(COLOURS[number % 2], DASHES[number // 2], name))
    return Chart(
        "clip_fraction",
        "Trust region",
        "Share of responses and tokens that the clip cuts",
        "By step; healthy between 1 % and 30 %. Below the shade the bounds never bind; above it most "
        "off-policy data is thrown away. Steps without any clipping are gaps.",
        traces,
        STEP,
        "share clipped",
        "log_fraction",
        {"shapes": [shade(0.01, 0.3)]} if traces else {},
    )


def log_ratio_band(runs: Sequence[RunData]) -> Chart:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        style = style_of(runs, index, 0, "median")
        curves = {q: run.step_curve(f"log_ratio/q{q:02d}") for q in (5, 25, 50, 75, 95)}
        traces += band(curves[5], curves[95], style, "5 to 95 %", 0.16)
        if len(runs) == 1:
            traces += band(curves[25], curves[75], style, "25 to 75 %", 0.28)
        traces += line(curves[50], style)
        if run.clips_sequences:
            colour = NEUTRAL if len(runs) == 1 else style.colour
            traces += bound_lines(run, replace(style, colour=colour, dash="dash", kind="bounds"))
    return Chart(
        "log_ratio",
        "Trust region",
        "log s against the bounds",
        "Length-normalised log ratio of whole responses, quantiles of each step; its tails should reach "
        "the bounds, its middle should not. Bounds are drawn for objectives that clip whole responses.",
        traces,
        STEP,
        "log s (nats per token)",
        layout={"yaxis": {"exponentformat": "power", "tickformat": "~g", "zeroline": True}},
    )


def clip_by_mini_batch(runs: Sequence[RunData]) -> Chart:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        for number, (metric, name) in enumerate(
            (("clip_fraction/sequence", "responses"), ("clip_fraction/token", "tokens"))
        ):
            curve = run.mini_batch_curve(metric)
            if len(curve.x) > 1:
                traces += line(curve, style_of(runs, index, number, name), mode="lines+markers")
    return Chart(
        "clip_by_mini_batch",
        "Trust region",
        "Clipping by mini-batch",
        "Mean over the run; it should grow with the age of the data. The first mini-batch is on-policy: "
        "its ratio is 1 and nothing is cut.",
        traces,
        "updates since the responses were sampled",
        "share clipped",
        "fraction",
        {"xaxis": {"dtick": 1}},
    )


def divergence(runs: Sequence[RunData]) -> Chart:
    kinds = (
        ("kl/k3_old", "KL to old policy"),
        ("kl/reference", "KL to reference"),
        ("mismatch/mean_abs", "engine mismatch, mean"),
        ("mismatch/max_abs", "engine mismatch, largest"),
    )
    return Chart(
        "divergence",
        "Trust region",
        "How far the policy moves, and the engine from the trainer",
        "Estimated KL divergences, and how far the sampler's log-probs are from the trainer's at equal weights.",
        kind_lines(runs, kinds, log=True),
        STEP,
        "nats per token",
        "log",
    )


def routing_drift(runs: Sequence[RunData]) -> Chart:
    """One run: layer by update index; several: the mean over layers by update index."""
    traces: list[Trace] = []
    layers = runs[0].metric_names("moe/drift/") if len(runs) == 1 else []
    if layers:
        curves = [runs[0].mini_batch_curve(layer) for layer in layers]
        traces.append(drift_map([layer.rpartition("_")[2].lstrip("0") or "0" for layer in layers], curves))
    else:
        for index, run in enumerate(runs):
            curve = run.mini_batch_curve("moe/drift")
            traces += line(curve, style_of(runs, index, 0, "mean over layers"), mode="lines+markers")
    return Chart(
        "routing_drift",
        "Trust region",
        "Expert drift by layer and update",
        "Share of chosen experts that the recorded routes do not have, mean over the run. Under replay it is what "
        "the router would have chosen.",
        traces,
        "updates since the responses were sampled",
        "layer with a router" if layers else "share of experts changed",
        "linear" if layers else "fraction",
        {"xaxis": {"dtick": 1}, "yaxis": {"type": "category"}} if layers else {"xaxis": {"dtick": 1}},
    )


def lengths(runs: Sequence[RunData]) -> Chart:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        style = style_of(runs, index, 0, "mean")
        shortest, longest = run.step_curve("length/min"), run.step_curve("length/max")
        traces += band(shortest, longest, style, "shortest to longest", 0.14)
        traces += line(run.step_curve("length/mean"), style)
    return Chart(
        "length",
        "Responses",
        "Length of responses",
        "Tokens per response, stop token included. A sudden climb or fall often announces a collapse.",
        traces,
        STEP,
        "tokens",
        layout={"yaxis": {"rangemode": "tozero"}},
    )


def shares(runs: Sequence[RunData]) -> Chart:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        truncated = run.step_curve("truncated_fraction")
        traces += line(truncated, style_of(runs, index, 0, "truncated responses"))
        for number, (metric, name) in enumerate(
            (("groups/constant", "groups without signal"), ("groups/dropped", "groups dropped")), 1
        ):
            curve = share_of(run.step_curve(metric), run.step_curve("groups/total"))
            if any(curve.known):
                traces += line(curve, style_of(runs, index, number, name))
    return Chart(
        "shares",
        "Responses",
        "Truncated responses, groups without signal",
        "Truncated: the response ran into the token limit. Without signal: all rewards of the group are equal.",
        traces,
        STEP,
        "share",
        "fraction",
    )


def gradient_norm(runs: Sequence[RunData]) -> Chart:
    return Chart(
        "grad_norm",
        "Optimisation",
        "Gradient norm",
        "Norm before clipping, at every update; spikes announce trouble.",
        update_lines(runs, "grad_norm", log=True),
        UPDATE,
        "norm",
        "log",
    )


def entropy(runs: Sequence[RunData]) -> Chart:
    return Chart(
        "entropy",
        "Optimisation",
        "Entropy",
        "Mean entropy of the policy at response tokens. It falls as the policy learns; at zero all "
        "responses of a group are the same.",
        kind_lines(runs, (("entropy", "entropy"),)),
        STEP,
        "nats per token",
        layout={"yaxis": {"rangemode": "tozero"}},
    )


def loss(runs: Sequence[RunData]) -> Chart:
    return Chart(
        "loss",
        "Optimisation",
        "Loss",
        "A check, not a goal. It starts near zero in every step, because advantages are centred; it does "
        "not measure progress.",
        update_lines(runs, "loss"),
        UPDATE,
        "loss",
    )


def learning_rate(runs: Sequence[RunData]) -> Chart:
    return Chart(
        "learning_rate",
        "Optimisation",
        "Learning rate",
        "Rate of each update.",
        update_lines(runs, "learning_rate"),
        UPDATE,
        "learning rate",
        layout={"yaxis": {"rangemode": "tozero", "exponentformat": "power"}},
    )


def seconds(runs: Sequence[RunData]) -> Chart:
    phases = list({name: None for run in runs for name in run.phases()})
    traces: list[Trace] = []
    timed = [run for run in runs if run.num_steps_done]
    for number, phase in enumerate(phases):
        curves = [run.phase_seconds(phase) for run in timed]
        colour = PHASE_COLOURS[number % len(PHASE_COLOURS)]
        trace: Trace = {"type": "bar", "name": phase, "meta": {"run": None, "kind": phase}, "marker": {"color": colour}}
        if len(runs) == 1:
            trace |= {"x": curves[0].x, "y": curves[0].y}
        else:
            means = [sum(curve.known) / max(1, len(curve.known)) for curve in curves]
            trace |= {"y": [run.label for run in timed], "x": means, "orientation": "h"}
        traces.append(trace)
    several = len(runs) > 1
    return Chart(
        "seconds",
        "Time",
        "Where the seconds go",
        "Mean seconds of each phase of a step." if several else "Seconds of each phase, step by step.",
        traces,
        "seconds per step" if several else STEP,
        "" if several else "seconds",
        layout={
            "barmode": "stack",
            "bargap": 0.5 if several else 0.08,
            "yaxis": {"autorange": "reversed"} if several else {},
        },
    )


def sft_loss(runs: Sequence[RunData]) -> Chart:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        traces += line(run.sft_curve("loss"), style_of(runs, index, 0, "loss"))
    return Chart(
        "sft_loss",
        "Cold start",
        "Next-token loss",
        "Mean negative log-prob of the response tokens, at every update of supervised training.",
        traces,
        "update (supervised)",
        "nats per token",
        "log",
    )


def sft_evaluation(runs: Sequence[RunData]) -> Chart:
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        traces += evaluation_traces(run.evaluations().get("sft", []), style_of(runs, index, 0, "pass@1"), with_k=False)
    return Chart(
        "sft_evaluation",
        "Cold start",
        "Pass rate before reinforcement learning",
        "Held-out pass@1 during supervised training; rewards need spread, so neither 0 nor 1.",
        traces,
        "update (supervised)",
        "pass@1",
        "fraction",
    )
