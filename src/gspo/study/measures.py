"""What is read off a finished run: pure functions of its directory, by name.

A measure gives a number or None (not known), a series a curve. Both get the run and the options of the study's file.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gspo.errors import ConfigError
from gspo.report.series import Curve as RunCurve
from gspo.report.series import RunData, load_run
from gspo.study.schema import Curve

#: Inside the directory of a cell.
RUN = "run"
RECORDS = "records.json"

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """A finished cell: the run directory of a trained one, the records of another executor."""

    run: RunData | None = None
    records: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False  # it ended with an error of its own


def read_measured(directory: Path, failed: bool) -> Measured:
    """Reads the directory of a cell; one that failed before it wrote anything is empty."""
    events, records = directory / RUN / "events.jsonl", directory / RECORDS
    return Measured(
        run=load_run(directory / RUN) if events.exists() else None,
        records=json.loads(records.read_text(encoding="utf-8")) if records.exists() else {},
        failed=failed,
    )


def metric(measured: Measured, options: Options) -> float | None:
    """A logged metric, reduced over the run.

    options: metric; level "step" (default), "update" or "evaluation"; mini_batch (update only: the index of the
    mini-batch); first or last (how many values from either end); reduce "mean" (default), "max", "min".
    """
    values = _values(measured, options)
    if "first" in options:
        values = values[: int(options["first"])]
    if "last" in options:
        values = values[-int(options["last"]) :]
    if not values:
        return None
    reduce: Mapping[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "max": max, "min": min}
    return reduce[options.get("reduce", "mean")](values)


def collapsed(measured: Measured, options: Options) -> float | None:
    """1 if the run failed, or its metric ends below ``share`` of where it began; else 0.

    options: as of ``metric``, besides ``share``, ``begin`` and ``end`` (how many values from either end are averaged).
    """
    if measured.failed:
        return 1.0
    values = _values(measured, options)
    if not values:
        return None
    begin = statistics.fmean(values[: int(options["begin"])])
    return float(statistics.fmean(values[-int(options["end"]) :]) < float(options["share"]) * begin)


def slide(measured: Measured, options: Options) -> float | None:
    """How far a metric ends below its highest point, both averaged over ``window`` neighbouring values."""
    values, window = _values(measured, options), int(options.get("window", 1))
    means = [statistics.fmean(values[i : i + window]) for i in range(len(values) - window + 1)]
    return max(means) - means[-1] if means else None


def spikes(measured: Measured, options: Options) -> float | None:
    """Updates per 100 whose gradient norm is above ``factor`` (3) times the median of the ``window`` (20) before it."""
    factor, window = float(options.get("factor", 3.0)), int(options.get("window", 20))
    norms = _values(measured, {"metric": "grad_norm", "level": "update"})
    counted = range(window, len(norms))
    if not counted:
        return None
    found = sum(norms[i] > factor * statistics.median(norms[i - window : i]) for i in counted)
    return 100.0 * found / len(counted)


def difference(measured: Measured, options: Options) -> float | None:
    """``metric`` with the options of ``of`` minus that with those of ``minus``."""
    first, second = metric(measured, options["of"]), metric(measured, options["minus"])
    return None if first is None or second is None else first - second


def log10(measured: Measured, options: Options) -> float | None:
    """log10 of ``metric``; values below ``floor`` are taken as the floor, so that 0 stays comparable."""
    value = metric(measured, options)
    return None if value is None else math.log10(max(value, float(options["floor"])))


def failed(measured: Measured, options: Options) -> float | None:
    """1 if the run ended with an error of its own."""
    return float(measured.failed)


def record(measured: Measured, options: Options) -> float | None:
    """A number that the executor wrote. options: key."""
    return _number(measured.records.get("scalars", {}).get(options["key"]))


def steps(measured: Measured, options: Options) -> Curve | None:
    """A metric by step. options: metric."""
    return None if measured.run is None else _curve(measured.run.step_curve(options["metric"]))


def mini_batches(measured: Measured, options: Options) -> Curve | None:
    """Mean of a metric over the run by mini-batch index: updates since the responses were sampled. options: metric."""
    return None if measured.run is None else _curve(measured.run.mini_batch_curve(options["metric"]))


def evaluations(measured: Measured, options: Options) -> Curve | None:
    """A metric of the held-out evaluations by step. options: metric."""
    if measured.run is None:
        return None
    events = measured.run.main_evaluation()
    found = [_number(event["metrics"].get(options["metric"])) for event in events]
    return Curve(x=tuple(float(event["step"]) for event in events), y=tuple(found))


def layers(measured: Measured, options: Options) -> Curve | None:
    """Mean of ``metric/layer_NN`` over the updates of one ``mini_batch`` by layer."""
    run = measured.run
    if run is None:
        return None
    names = run.metric_names(f"{options['metric']}/")
    means = [metric(measured, {"metric": n, "level": "update", "mini_batch": options["mini_batch"]}) for n in names]
    return Curve(x=tuple(float(index) for index in range(len(names))), y=tuple(means))


def predicted_clip(measured: Measured, options: Options) -> Curve | None:
    """The clip fraction by mini-batch index that a normal log s of the measured spread would give.

    With log s ~ N(0, sigma^2), independent of the sign of an advantage that is as often above as below 0:
    ``(Q(log(1 + high) / sigma) + Q(-log(1 - low) / sigma)) / 2``, Q the upper tail. sigma is the root mean square of
    log_ratio/std over the run's updates of that index; low and high are the run's own bounds.
    """
    run = measured.run
    if run is None:
        return None
    spread: dict[int, list[float]] = {}
    for event in run.of_type("update"):
        value = _number(event["metrics"].get("log_ratio/std"))
        if value is not None:
            spread.setdefault(int(event["mini_batch"]), []).append(value)
    low, high = metric(measured, {"metric": "clip_low"}), metric(measured, {"metric": "clip_high"})
    if low is None or high is None:
        return None
    order = sorted(spread)
    sigmas = [math.sqrt(statistics.fmean(value**2 for value in spread[index])) for index in order]
    return Curve(x=tuple(map(float, order)), y=tuple(normal_clip_fraction(sigma, low, high) for sigma in sigmas))


def normal_clip_fraction(sigma: float, low: float, high: float) -> float:
    """See :func:`predicted_clip`."""
    if sigma == 0:
        return 0.0
    upper = statistics.NormalDist().cdf(-math.log1p(high) / sigma)
    lower = statistics.NormalDist().cdf(math.log1p(-low) / sigma) if low < 1 else 0.0
    return (upper + lower) / 2


def record_series(measured: Measured, options: Options) -> Curve | None:
    """A curve that the executor wrote. options: key."""
    found = measured.records.get("series", {}).get(options["key"])
    return None if found is None else Curve.model_validate(found)


MEASURES: Mapping[str, Callable[[Measured, Options], float | None]] = MappingProxyType(
    {
        "metric": metric,
        "difference": difference,
        "log10": log10,
        "collapsed": collapsed,
        "failed": failed,
        "slide": slide,
        "spikes": spikes,
        "record": record,
    }
)
SERIES: Mapping[str, Callable[[Measured, Options], Curve | None]] = MappingProxyType(
    {
        "steps": steps,
        "mini_batches": mini_batches,
        "evaluations": evaluations,
        "layers": layers,
        "predicted_clip": predicted_clip,
        "record": record_series,
    }
)


def _values(measured: Measured, options: Options) -> list[float]:
    """The known values of a metric in their order."""
    run, name, level = measured.run, options["metric"], options.get("level", "step")
    if run is None:
        return []
    if level == "step":
        return run.step_curve(name).known
    if level == "evaluation":
        events = run.main_evaluation()
    elif level == "update":
        wanted = options.get("mini_batch")
        events = [e for e in run.of_type("update") if wanted is None or e["mini_batch"] == wanted]
    else:
        raise ConfigError(f'measure on {name}: level is {level!r}; it is "step", "update" or "evaluation"')
    found = (_number(event["metrics"].get(name)) for event in events)
    return [value for value in found if value is not None]


def _curve(curve: RunCurve) -> Curve:
    return Curve(x=tuple(curve.x), y=tuple(curve.y))


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None
