"""What a run directory says, as curves. Reads only what ``gspo.events`` wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.errors import RunDirectoryError
from gspo.events import EventLog, RunDirectory, read_event_log

#: Objectives that compare the ratio of a whole response with the bounds.
SEQUENCE_OBJECTIVES = ("gspo", "gspo_token", "luspo")

Event = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """Points of one line; a value that was not finite or not logged is None."""

    x: list[float] = field(default_factory=list)
    y: list[float | None] = field(default_factory=list)

    @property
    def known(self) -> list[float]:
        return [value for value in self.y if value is not None]

    def __bool__(self) -> bool:
        return bool(self.known)


@dataclass(frozen=True)
class RunData:
    """One run, read."""

    path: Path
    label: str  # unique among the runs of a page
    log: EventLog
    config_text: str
    info: Event

    def of_type(self, kind: str) -> list[Event]:
        return self.log.of_type(kind)

    @property
    def start(self) -> Event:
        """All start events in one (a cold start and the training that follows may each write one)."""
        merged: Event = {}
        for event in self.of_type("start"):
            merged |= event
        return merged

    @property
    def end(self) -> Event | None:
        ends = self.of_type("end")
        return ends[-1] if ends else None

    @property
    def num_steps_done(self) -> int:
        return len(self.of_type("step"))

    @property
    def only_supervised(self) -> bool:
        """Whether the run is over and was supervised training alone, whatever its recipe says besides."""
        return self.end is not None and not self.num_steps_done and bool(self.of_type("sft"))

    @property
    def clips_sequences(self) -> bool:
        return self.start.get("objective") in SEQUENCE_OBJECTIVES

    def step_curve(self, metric: str) -> Curve:
        """A metric of the step events by step; from the updates' mean where only they carry it."""
        curve = _curve(self.of_type("step"), metric, lambda event: float(event["step"]))
        return curve if curve else _by_step(self.of_type("update"), metric)

    def update_curve(self, metric: str) -> Curve:
        """A metric by optimizer update."""
        return _curve(self.of_type("update"), metric, lambda event: float(event["update"]))

    def sft_curve(self, metric: str) -> Curve:
        return _curve(self.of_type("sft"), metric, lambda event: float(event["update"]))

    def mini_batch_curve(self, metric: str) -> Curve:
        """Mean of a metric over all steps, by the number of updates that the sampling weights are behind."""
        found: dict[int, list[float]] = {}
        for event in self.of_type("update"):
            value = _number(event["metrics"].get(metric))
            if value is not None:
                found.setdefault(int(event["mini_batch"]), []).append(value)
        order = sorted(found)
        return Curve([float(i) for i in order], [sum(found[i]) / len(found[i]) for i in order])

    def metric_names(self, prefix: str) -> list[str]:
        """Names of update metrics that start like this, sorted."""
        return sorted(
            {name for event in self.of_type("update") for name in event["metrics"] if name.startswith(prefix)}
        )

    def evaluations(self) -> dict[str, list[Event]]:
        """Evaluation events by name, each list in the order of time."""
        found: dict[str, list[Event]] = {}
        for event in self.of_type("evaluation"):
            if _number(event["metrics"].get("pass@1")) is not None:
                found.setdefault(str(event["name"]), []).append(event)
        return found

    def main_evaluation(self) -> list[Event]:
        """The evaluation that the run is judged by: the first name that is not supervised training's."""
        found = self.evaluations()
        names = [name for name in found if name != "sft"] or list(found)
        return found[names[0]] if names else []

    def phases(self) -> list[str]:
        """Names of the timed phases in the order in which they first appear."""
        names = {name: None for event in self.of_type("step") for name in event["seconds"]}
        return [name for name in names if name != "total"]

    def phase_seconds(self, phase: str) -> Curve:
        steps = self.of_type("step")
        return Curve(
            [float(event["step"]) for event in steps], [float(event["seconds"].get(phase) or 0.0) for event in steps]
        )


def load_run(path: Path, label: str | None = None) -> RunData:
    """Reads a run directory.

    Raises:
        RunDirectoryError: there is no run in ``path``.
        DataError: its events are damaged, with file and line.
    """
    run = RunDirectory(path)
    if not run.events_path.is_file():
        raise RunDirectoryError(f"{path} is not a run directory: it has no {run.events_path.name}")
    log = read_event_log(run.events_path)
    start = next(iter(log.of_type("start")), {})
    return RunData(
        path=path,
        label=label or str(start.get("name") or path.name),
        log=log,
        config_text=run.recipe_path.read_text(encoding="utf-8") if run.recipe_path.is_file() else "",
        info=_read_info(run.info_path),
    )


def load_runs(paths: Sequence[Path]) -> list[RunData]:
    """Reads several runs; runs of the same name get the name of their directory beside it."""
    runs = [load_run(path) for path in paths]
    names = [run.label for run in runs]
    labelled: list[RunData] = []
    for index, run in enumerate(runs):
        label = run.label
        if names.count(label) > 1:
            label = f"{label} ({run.path.name})"
        if any(label == other.label for other in labelled):
            label = f"{label} #{index + 1}"
        labelled.append(RunData(run.path, label, run.log, run.config_text, run.info))
    return labelled


def _read_info(path: Path) -> Event:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run that died while it was being made; the page does without
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _curve(events: Sequence[Event], metric: str, where: Callable[[Event], float]) -> Curve:
    seen = [event for event in events if metric in event["metrics"]]
    return Curve([where(event) for event in seen], [_number(event["metrics"][metric]) for event in seen])


def _by_step(updates: Sequence[Event], metric: str) -> Curve:
    found: dict[int, list[float]] = {}
    for event in updates:
        value = _number(event["metrics"].get(metric))
        if value is not None:
            found.setdefault(int(event["step"]), []).append(value)
    return Curve([float(step) for step in found], [sum(values) / len(values) for values in found.values()])
