"""The figures of a study as lines and dots, drawn twice: as SVG for Markdown, by plotly for the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from gspo.report.traces import COLOURS
from gspo.study.load import arm_of, level_value
from gspo.study.schema import Figure, Results, RunResult, Study
from gspo.study.statistics import interval_over_seeds

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One arm (at the levels that the figure does not show) in one colour.

    points: means over seeds; bars: (low, high) of each, where there is an interval; faint: the seeds one by one.
    """

    label: str
    colour: str
    points: tuple[Point, ...]
    bars: tuple[tuple[float, float] | None, ...] = ()
    faint: tuple[tuple[Point, ...], ...] = ()
    dots: tuple[Point, ...] = ()
    dash: bool = False


@dataclass(frozen=True)
class Drawing:
    """A figure ready to be drawn. ticks: names of x positions where x is no number."""

    figure: Figure
    lines: tuple[Line, ...]
    ticks: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not any(line.points or line.dots or line.faint for line in self.lines)


def draw(study: Study, results: Results, figure: Figure, excluded: Mapping[int, str]) -> Drawing:
    """Puts the results of the figure's arms into lines; excluded seeds are not drawn."""
    runs = [run for run in results.runs if _shown(run, figure) and run.cell.seed not in excluded]
    makers = {"series": _series, "points": _points, "strip": _strip}
    return makers[figure.kind](study, figure, _grouped(study, figure, runs))


def _shown(run: RunResult, figure: Figure) -> bool:
    fits = all(run.cell.levels.get(axis, level) == level for axis, level in figure.where.items())
    return fits and (not figure.arms or run.cell.arm in figure.arms)


_Groups = dict[str, list[RunResult]]


def _grouped(study: Study, figure: Figure, runs: Sequence[RunResult]) -> _Groups:
    """One group per arm and per level of the axes that are neither x nor fixed by ``where``.

    One per arm where x is a measure, along which the levels lie, and where there would be more lines than colours.
    """
    axes = {axis.name for axis in study.axes}
    groups = by_label(study, runs, hidden={figure.x or "", *figure.where})
    along = figure.kind == "points" and figure.x not in axes
    return by_label(study, runs, hidden=axes) if along or len(groups) > len(COLOURS) else groups


def by_label(study: Study, runs: Sequence[RunResult], hidden: Container[str] = ()) -> dict[str, list[RunResult]]:
    """Label of arm and levels -> its runs, in the order of the file; levels of hidden axes are not told apart."""
    arms = [arm.name for arm in study.arms]
    levels = {axis.name: [level.name for level in axis.levels] for axis in study.axes}

    def place(run: RunResult) -> tuple[int, ...]:
        cell = run.cell
        return arms.index(cell.arm), *(levels[axis].index(level) for axis, level in cell.levels.items())

    found: dict[str, list[RunResult]] = {}
    for run in sorted(runs, key=place):
        shown = [f"{axis} {level}" for axis, level in run.cell.levels.items() if axis not in hidden]
        found.setdefault(", ".join([arm_of(study, run.cell.arm).label, *shown]), []).append(run)
    return found


def _usable(figure: Figure, point: tuple[float, float | None]) -> bool:
    """Whether a point has a place on the figure's axes."""
    x, y = point
    return y is not None and math.isfinite(y) and not (figure.log_y and y <= 0) and not (figure.log_x and x <= 0)


def _series(study: Study, figure: Figure, groups: _Groups) -> Drawing:
    lines = []
    for index, (label, runs) in enumerate(groups.items()):
        curves = [run.series[figure.y] for run in runs if figure.y in run.series]
        seeds = [
            tuple((x, y) for x, y in zip(c.x, c.y, strict=True) if y is not None and _usable(figure, (x, y)))
            for c in curves
        ]
        by_x: dict[float, list[float]] = {}
        for seed in seeds:
            for x, y in seed:
                by_x.setdefault(x, []).append(y)
        points = tuple((x, statistics.fmean(by_x[x])) for x in sorted(by_x))
        lines.append(Line(label, _colour(index), points, faint=tuple(seeds) if len(seeds) > 1 else ()))
    return Drawing(figure, tuple(lines))


def _points(study: Study, figure: Figure, groups: _Groups) -> Drawing:
    assert figure.x is not None  # study/load.py has seen to it
    lines = []
    for index, (label, runs) in enumerate(groups.items()):
        places: dict[tuple[tuple[str, str], ...], list[RunResult]] = {}
        for run in runs:
            places.setdefault(tuple(run.cell.levels.items()), []).append(run)
        found = []
        for here in places.values():
            xs = [x for x in (_x_of(study, figure.x, run) for run in here) if x is not None]
            ys = [y for y in (run.scalars.get(figure.y) for run in here) if y is not None]
            if xs and ys and _usable(figure, (statistics.fmean(xs), statistics.fmean(ys))):
                found.append((statistics.fmean(xs), statistics.fmean(ys), _bar(study, ys)))
        found.sort(key=lambda item: item[0])
        points = tuple((x, y) for x, y, _ in found)
        lines.append(Line(label, _colour(index), points, tuple(bar for _, _, bar in found)))
    return Drawing(figure, tuple(lines))


def _x_of(study: Study, name: str, run: RunResult) -> float | None:
    if name in run.cell.levels:
        return level_value(study, name, run.cell.levels[name])
    return run.scalars.get(name)


def _bar(study: Study, values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2:
        return None
    interval = interval_over_seeds(values, confidence=study.confidence, num_resamples=study.num_bootstrap)
    return interval.low, interval.high


def _strip(study: Study, figure: Figure, groups: _Groups) -> Drawing:
    lines = []
    for index, (label, runs) in enumerate(groups.items()):
        values = [run.scalars.get(figure.y) for run in sorted(runs, key=lambda run: run.cell.seed)]
        known = [value for value in values if value is not None and _usable(figure, (1.0, value))]
        spread = [(place - (len(known) - 1) / 2) * 0.5 / max(1, len(known)) for place in range(len(known))]
        dots = tuple((index + shift, value) for shift, value in zip(spread, known, strict=True))
        mean = ((float(index), statistics.fmean(known)),) if known else ()
        lines.append(Line(label, _colour(index), mean, (_bar(study, known),) if known else (), dots=dots))
    return Drawing(figure, tuple(lines), tuple(groups))


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
