"""The finished runs of a study's directory as results; results.json read back."""

from __future__ import annotations

import json
import math
import os
import platform
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gspo.errors import DataError, RunDirectoryError
from gspo.events import package_versions
from gspo.study.execute import DONE, JOB
from gspo.study.load import LoadedStudy
from gspo.study.measures import MEASURES, SERIES, read_measured
from gspo.study.run import check_digests
from gspo.study.schema import Cell, Results, RunResult, Study


def collect(loaded: LoadedStudy, directory: Path, *, quick: bool) -> Results:
    """Measures every finished run under the study's directory.

    Raises:
        RunDirectoryError: there is none.
        ConfigError: one was made by another version of the study's file.
        DataError: a run's events are damaged.
    """
    check_digests(loaded, directory / "runs")
    places = sorted(path.parent for path in (directory / "runs").glob(f"*/{DONE}"))
    if not places:
        raise RunDirectoryError(f"{directory} holds no finished run of study {loaded.study.name}; gspo study run first")
    explored = sorted(path.parent for path in (directory / "exploration").glob(f"*/{DONE}"))
    found = Results(
        study=loaded.study.name,
        digest=loaded.digest,
        quick=quick,
        versions=package_versions(),
        host=_host(),
        runs=tuple(measure_run(loaded.study, place) for place in places),
        exploration=tuple(measure_run(loaded.study, place) for place in explored),
    )
    return Results.model_validate_json(results_text(found))  # what is judged now is what is judged again later


def measure_run(study: Study, place: Path) -> RunResult:
    """All measures and series of one finished cell."""
    done = _read_json(place / DONE)
    measured = read_measured(place, done["status"] == "failed")
    series = {item.name: SERIES[item.function](measured, item.options) for item in study.series}
    return RunResult(
        cell=Cell.model_validate(_read_json(place / JOB)["cell"]),
        status=done["status"],
        message=done["message"],
        seconds=done["seconds"],
        scalars={item.name: MEASURES[item.function](measured, item.options) for item in study.measures},
        series={name: curve for name, curve in series.items() if curve is not None},
    )


def read_results(path: Path, loaded: LoadedStudy) -> Results:
    """results.json, written by a report.

    Raises:
        DataError: it cannot be read, or belongs to another study or another version of its file.
    """
    try:
        results = Results.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(f"{path}: cannot be read as results of a study: {error}") from error
    if (results.study, results.digest) != (loaded.study.name, loaded.digest):
        raise DataError(
            f"{path} has results of study {results.study} ({results.digest}), not of {loaded.study.name} "
            f"({loaded.digest}): what was run must be judged by the file that it was run by"
        )
    return results


def results_text(results: Results) -> str:
    """results.json: one run a line, numbers to six digits."""
    tree = results.model_dump(mode="json", exclude={"runs", "exploration"})
    parts = [f'"{key}": {json.dumps(value)}' for key, value in tree.items()]
    for name, runs in (("runs", results.runs), ("exploration", results.exploration)):
        lines = ",\n".join(json.dumps(_short(run.model_dump(mode="json"))) for run in runs)
        parts.append(f'"{name}": [\n{lines}\n]' if runs else f'"{name}": []')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _short(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list) else value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); remove its directory, and gspo study run makes it again"
        ) from (error)
    return dict(found)


def _host() -> dict[str, Any]:
    return {"system": platform.system(), "machine": platform.machine(), "CPUs": os.cpu_count()}
