"""Small studies and results that are made up, so that every number can be derived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gspo.study.schema import Cell, Results, RunResult, Study

TREE: dict[str, Any] = {
    "name": "made-up",
    "title": "A made-up study",
    "claim": "a is above b",
    "paper": {"says": "a 2, b 1", "source": "nowhere, figure 0"},
    "regime": "no model",
    "executor": "tests.study.builders:executor",
    "cold_start": False,
    "recipe": {"model": {"tiny": "qwen3"}, "data": {"task": "arithmetic:addition", "num_prompts": 40}},
    "seeds": [0, 1, 2, 3, 4, 5],
    "axes": [
        {
            "name": "size",
            "label": "size",
            "levels": [
                {"name": "1", "value": 1.0, "overrides": {"options.size": 1}},
                {"name": "4", "value": 4.0, "overrides": {"options.size": 4}},
            ],
        }
    ],
    "arms": [
        {"name": "a", "label": "arm A", "axes": ["size"], "options": {"level": 2.0}},
        {"name": "b", "label": "arm B", "axes": ["size"], "options": {"level": 1.0}},
        {"name": "plain", "label": "control", "role": "control"},
    ],
    "measures": [
        {"name": "score", "function": "record", "options": {"key": "score"}, "label": "score"},
        {"name": "size", "function": "record", "options": {"key": "size"}, "label": "size"},
    ],
    "series": [{"name": "path", "function": "record", "options": {"key": "path"}}],
    "slopes": [{"name": "growth", "y": "score", "x": "size", "axis": "size", "arm": "a", "label": "growth"}],
    "contrasts": [
        {"name": "a-b", "says": "a above b", "measure": "score", "arm": "a", "against": "b", "alternative": "greater"},
    ],
    "controls": [{"name": "low", "says": "the control is low", "arm": "plain", "measure": "score", "high": 0.5}],
    "verdict": {"needs": ["a-b"]},
    "figures": [
        {
            "id": "strip",
            "title": "Scores",
            "caption": "c",
            "kind": "strip",
            "y": "score",
            "x_title": "",
            "y_title": "s",
        },
        {
            "id": "points",
            "title": "By size",
            "caption": "c",
            "kind": "points",
            "y": "score",
            "x": "size",
            "x_title": "size",
            "y_title": "score",
            "arms": ["a", "b"],
            "log_x": True,
            "main": True,
        },
        {"id": "path", "title": "Path", "caption": "c", "kind": "series", "y": "path", "x_title": "t", "y_title": "y"},
    ],
    "exploration": {"text": "sizes 1 to 4 were tried"},
    "quick": {"seeds": [0], "levels": {"size": ["1"]}},
}


def study(**changes: Any) -> Study:
    return Study.model_validate({**TREE, **changes})


def run(arm: str, seed: int, score: float | None, size: str | None = None, status: str = "finished") -> RunResult:
    levels = {} if size is None else {"size": size}
    scalars = {"score": score, "size": None if size is None else float(size)}
    return RunResult(
        cell=Cell(arm=arm, levels=levels, seed=seed),
        status=status,
        seconds=1.0,
        scalars=scalars,  # type: ignore[arg-type]
    )


def results(runs: list[RunResult], **changes: Any) -> Results:
    return Results(study="made-up", digest="d", versions={}, runs=tuple(runs), **changes)


def executor(job: Any) -> Any:
    """score = level * sqrt(size) + seed / 100; the seed 5 of arm b goes wrong if the arm says so."""
    from gspo.errors import RunError
    from gspo.study.execute import Records
    from gspo.study.schema import Curve

    if job.options.get("fails"):
        raise RunError("it went wrong")
    if job.options.get("dies"):
        raise ZeroDivisionError
    size = float(job.options.get("size", 0))
    score = float(job.options.get("level", 0.0)) * size**0.5 + job.recipe.run.seed / 100
    Path(job.directory / "seen.txt").write_text(job.cell.place)
    curve = Curve(x=(1.0, 2.0), y=(score, None))
    return Records({"score": score, "size": size}, {"path": curve})
