from __future__ import annotations

import io

from rich.console import Console

from gspo.report.terminal import step_line, step_table

EVENT = {
    "type": "step",
    "step": 3,
    "seconds": {"total": 1.0},
    "metrics": {"reward/mean": 0.5, "moe/drift": 0.124, "moe/engine_drift": 0.01, "moe/load_max": 1.6},
}


def test_drift_is_shown_where_there_are_experts_only() -> None:
    assert "drift 12.4%" in step_line(EVENT)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(step_table(EVENT, {}))
    text = console.export_text()
    assert "12.4% of experts   from the engine 1.0%" in text
    assert "busiest 1.6 even shares" in text
    dense = {**EVENT, "metrics": {"reward/mean": 0.5}}
    assert "drift" not in step_line(dense)
