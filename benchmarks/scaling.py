"""How the cost of a step grows: with tokens, group size, response length and vocabulary. Draws one page of plots.

    python -m benchmarks.scaling --output build/scaling.html --json build/scaling.jsonl

Each point is the median of a few rounds; each series ends with the exponent of a straight line through the logarithms
(1 is linear). What should be linear: rollout and update in the number of rows, the update in the response length while
attention is small, and in the vocabulary once the projection dominates.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ours import Ours
from benchmarks.workloads import DENSE, WORKLOADS, Workload
from gspo.policy.causal_lm import load_policy

VOCABULARIES = (1000, 4000, 16_000, 64_000, 128_000)
BASE = replace(WORKLOADS["w1"], name="scaling", num_prompts=8, num_mini_batches=1)


def series(quick: bool = False) -> dict[str, list[tuple[int, Workload]]]:
    """(x, workload) by name of the axis."""
    steps = 2 if quick else 5
    made_up = replace(BASE, rollout=False, num_prompts=2)
    return {
        "prompts": [(n, replace(BASE, num_prompts=n)) for n in (2, 4, 8, 16, 32)[:steps]],
        "group_size": [(n, replace(BASE, group_size=n)) for n in (2, 4, 8, 16, 32)[:steps]],
        "response_length": [(n, replace(BASE, lengths=(n,))) for n in (16, 32, 64, 128, 256)[:steps]],
        "vocabulary": [(n, replace(made_up, tiny_config=DENSE | {"vocab_size": n})) for n in VOCABULARIES[:steps]],
    }


def measure(axis: str, points: Sequence[tuple[int, Workload]], rounds: int) -> list[dict[str, Any]]:
    lines = []
    for x, workload in points:
        with tempfile.TemporaryDirectory() as directory:
            load_policy(tiny=workload.tiny, tiny_config=workload.tiny_config, device="cpu").save(directory)
            ours = Ours(workload, directory)
        found = [ours.round("") for _ in range(rounds + 1)][1:]
        for stage in ("rollout", "update"):
            if stage in found[0]["seconds"]:
                seconds = statistics.median(r["seconds"][stage] for r in found)
                lines.append(
                    {"axis": axis, "x": x, "stage": stage, "seconds": seconds, "flops": found[0]["flops"][stage]}
                )
    return lines


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Slope of log y over log x, least squares."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def draw(lines: Sequence[dict[str, Any]], output: Path) -> None:
    """One panel per axis, both in logarithms, costs relative to the first point."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    axes = list(dict.fromkeys(line["axis"] for line in lines))
    figure = make_subplots(1, len(axes), subplot_titles=[axis.replace("_", " ") for axis in axes])
    for column, axis in enumerate(axes, 1):
        for stage in ("rollout", "update"):
            points = [(line["x"], line["seconds"]) for line in lines if (line["axis"], line["stage"]) == (axis, stage)]
            if not points:
                continue
            name = f"{stage}: exponent {exponent(points):.2f}"
            relative = [y / points[0][1] for _, y in points]
            figure.add_trace(go.Scatter(x=[x for x, _ in points], y=relative, name=f"{axis}, {name}"), 1, column)
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log", title_text="cost, first point = 1", col=1)
    figure.update_layout(title="Cost of a step", template="plotly_white")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(output, include_plotlyjs=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/scaling.html"))
    parser.add_argument("--json", type=Path, default=Path("build/scaling.jsonl"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two points per series")
    arguments = parser.parse_args()
    lines = []
    for axis, points in series(arguments.quick).items():
        found = measure(axis, points, arguments.rounds)
        lines += found
        for stage in ("rollout", "update"):
            pairs = [(line["x"], line["seconds"]) for line in found if line["stage"] == stage]
            if pairs:
                print(json.dumps({"axis": axis, "stage": stage, "exponent": round(exponent(pairs), 3)}), flush=True)
    draw(lines, arguments.output)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
