"""Looks at what `make study-quick` left: pages are there, numbers are finite, and the mechanics are seen.

``python -m tests.study.smoke build/studies`` ends with an AssertionError that names what is missing.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

STUDIES = ("clip-fraction", "routing-drift", "gradient-noise")


def results_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The runs of a study, after looking at its pages and numbers."""
    directory = folder / name
    page = (directory / f"{name}.md").read_text(encoding="utf-8")
    assert "**Verdict: smoke run: no verdict**" in page, f"{name}: no page of a smoke run"
    assert list((directory / name).glob("*.svg")), f"{name}: no figure"
    assert (directory / "report.html").stat().st_size > 10_000, f"{name}: the HTML page is empty"
    runs: list[dict[str, Any]] = json.loads((directory / name / "results.json").read_text(encoding="utf-8"))["runs"]
    assert runs, f"{name}: no run"
    for run in runs:
        assert run["status"] == "finished", f"{name}: {run['cell']} {run['status']}: {run['message']}"
        known = [value for value in run["scalars"].values() if value is not None]
        assert known, f"{name}: {run['cell']} has no number"
        assert all(math.isfinite(value) for value in known), f"{name}: {run['cell']} has a number that is not finite"
    return runs


def by_arm(runs: list[dict[str, Any]], arm: str, measure: str) -> float:
    return float(next(run for run in runs if run["cell"]["arm"] == arm)["scalars"][measure])


def main(folder: Path) -> None:
    found = {name: results_of(folder, name) for name in STUDIES}
    gspo, grpo = (by_arm(found["clip-fraction"], arm, "clipped") for arm in ("gspo", "grpo"))
    assert gspo > 10 * grpo, f"GSPO clips {gspo:.4f} of the tokens, GRPO {grpo:.4f}: the regimes do not match"
    one, three = (by_arm(found["routing-drift"], "moe", measure) for measure in ("drift_1", "drift_3"))
    assert 0 < one < three < 0.5, f"drift is {one:.4f} after one update and {three:.4f} after three"
    print(f"clip fraction {gspo:.3f} against {grpo:.5f}; drift {one:.4f} after one update, {three:.4f} after three")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
