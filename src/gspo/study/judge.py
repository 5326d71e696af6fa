"""From results to a verdict, by the study's file and nothing else.

The unit is the seed: where an arm is crossed with axes, its values are averaged over the levels within a seed first,
because runs of one seed share their cold start and are no independent draws.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gspo.evals.statistics import Interval, holm
from gspo.study.schema import Cell, Contrast, Control, Results, RunResult, Slope, Study
from gspo.study.statistics import interval_over_seeds, log_slope, p_value, refuted_p

Outcome = Literal["holds", "refuted", "undecided", "no data"]
Word = Literal["supported", "not supported", "not reproduced at this scale", "void", "smoke run: no verdict"]


@dataclass(frozen=True)
class JudgedContrast:
    """A planned comparison with its answer."""

    contrast: Contrast
    outcome: Outcome
    interval: Interval | None  # of the mean difference
    p_value: float | None
    adjusted: float | None  # p-value after Holm
    differences: tuple[float, ...]  # one per seed
    num_holding: int  # seeds whose own difference lies on the claimed side


@dataclass(frozen=True)
class JudgedControl:
    """A control and whether it did what it must."""

    control: Control
    value: float | None  # mean over the arm's runs
    passed: bool


@dataclass(frozen=True)
class Judgement:
    """What a study comes to."""

    word: Word
    reason: str
    contrasts: tuple[JudgedContrast, ...]
    controls: tuple[JudgedControl, ...]
    excluded: Mapping[int, str]  # seeds left out and why
    num_runs: int
    num_failed: int


def judge(study: Study, results: Results) -> Judgement:
    """The verdict: void if a control fails, else by the contrasts that the file says are needed."""
    excluded = excluded_seeds(study, results)
    runs = [run for run in results.runs if run.cell.seed not in excluded]
    table = {**_slopes(study, runs), **_table(runs)}
    contrasts = _judge_contrasts(study, table)
    controls = tuple(_judge_control(control, table) for control in study.controls)
    word, reason = _word(study, results.quick, contrasts, controls)
    failed = sum(run.status == "failed" for run in results.runs)
    return Judgement(word, reason, contrasts, controls, excluded, len(results.runs), failed)


def excluded_seeds(study: Study, results: Results) -> dict[int, str]:
    """Seeds with a run whose measure lies outside the file's limits."""
    found: dict[int, str] = {}
    for exclusion in study.exclusions:
        for run in results.runs:
            value = run.scalars.get(exclusion.measure)
            if value is not None and not exclusion.low <= value <= exclusion.high:
                found.setdefault(
                    run.cell.seed,
                    f"{exclusion.measure} of {run.cell.arm} is {value:.3g}, outside {exclusion.low:g} to "
                    f"{exclusion.high:g}",
                )
    return found


_Key = tuple[str, tuple[tuple[str, str], ...], int, str]  # arm, levels, seed, measure
_Table = dict[_Key, float]


def _key(cell: Cell, measure: str) -> _Key:
    return cell.arm, tuple(sorted(cell.levels.items())), cell.seed, measure


def _table(runs: list[RunResult]) -> _Table:
    return {_key(run.cell, name): value for run in runs for name, value in run.scalars.items() if value is not None}


def _slopes(study: Study, runs: list[RunResult]) -> _Table:
    found: _Table = {}
    for slope in study.slopes:
        for seed in sorted({run.cell.seed for run in runs}):
            value = _slope(slope, [run for run in runs if run.cell.seed == seed and run.cell.arm == slope.arm])
            if value is not None:
                found[(slope.arm, (), seed, slope.name)] = value
    return found


def _slope(slope: Slope, runs: list[RunResult]) -> float | None:
    fitting = [run for run in runs if slope.where.items() <= run.cell.levels.items()]
    points = [(run.scalars.get(slope.x), run.scalars.get(slope.y)) for run in fitting]
    known = [(x, y) for x, y in points if x is not None and y is not None]
    return log_slope([x for x, _ in known], [y for _, y in known]) if known else None


def values_by_seed(
    table: Mapping[_Key, float], arm: str, measure: str, where: Mapping[str, str]
) -> dict[int, dict[tuple[tuple[str, str], ...], float]]:
    """seed -> levels -> value."""
    found: dict[int, dict[tuple[tuple[str, str], ...], float]] = {}
    for (name, levels, seed, what), value in table.items():
        if name == arm and what == measure and (where.items() <= dict(levels).items() or not levels):
            found.setdefault(seed, {})[levels] = value
    return found


def _differences(contrast: Contrast, table: _Table) -> tuple[float, ...]:
    """One number per seed: the mean over the levels that both arms have. An arm without levels stands beside all."""
    first = values_by_seed(table, contrast.arm, contrast.measure, contrast.where)
    if contrast.against is None:
        return tuple(statistics.fmean(first[seed].values()) for seed in sorted(first))
    second = values_by_seed(table, contrast.against, contrast.measure, contrast.where)
    found = []
    for seed in sorted(first.keys() & second.keys()):
        one, other = first[seed], second[seed]
        if set(one) == {()} or set(other) == {()}:
            found.append(statistics.fmean(one.values()) - statistics.fmean(other.values()))
        elif shared := one.keys() & other.keys():
            found.append(statistics.fmean(one[levels] - other[levels] for levels in sorted(shared)))
    return tuple(found)


def _judge_contrasts(study: Study, table: _Table) -> tuple[JudgedContrast, ...]:
    differences = {contrast.name: _differences(contrast, table) for contrast in study.contrasts}
    found = {contrast.name: contrast for contrast in study.contrasts if differences[contrast.name]}

    def asked(name: str) -> tuple[tuple[float, ...], str, float, float | None]:
        contrast = found[name]
        return differences[name], contrast.alternative, contrast.null, contrast.margin

    plain = {name: p_value(*asked(name)) for name in found}  # type: ignore[arg-type]
    contrary = {name: refuted_p(*asked(name)) for name in found}  # type: ignore[arg-type]
    adjusted, against = (dict(zip(found, holm(list(found_p.values())), strict=True)) for found_p in (plain, contrary))
    judged = []
    for contrast in study.contrasts:
        name, values = contrast.name, differences[contrast.name]
        if name not in found:
            judged.append(JudgedContrast(contrast, "no data", None, None, None, (), 0))
            continue
        outcome: Outcome = "undecided"
        if adjusted[name] <= study.alpha:
            outcome = "holds"
        elif against[name] <= study.alpha:
            outcome = "refuted"
        interval = interval_over_seeds(values, confidence=study.confidence, num_resamples=study.num_bootstrap)
        judged.append(
            JudgedContrast(
                contrast,
                outcome,
                interval,
                plain[name],
                adjusted[name],
                values,
                sum(_holds(contrast, v) for v in values),
            )
        )
    return tuple(judged)


def _holds(contrast: Contrast, value: float) -> bool:
    """Whether one seed lies on the claimed side."""
    if contrast.alternative == "equivalent":
        return abs(value - contrast.null) < (contrast.margin or 0.0)
    if contrast.alternative == "different":
        return value != contrast.null
    return value > contrast.null if contrast.alternative == "greater" else value < contrast.null


def _judge_control(control: Control, table: _Table) -> JudgedControl:
    by_seed = values_by_seed(table, control.arm, control.measure, control.where)
    values = [value for levels in by_seed.values() for value in levels.values()]
    if not values:
        return JudgedControl(control, None, False)
    mean = statistics.fmean(values)
    return JudgedControl(control, mean, control.low <= mean <= control.high)


def _word(
    study: Study, quick: bool, contrasts: tuple[JudgedContrast, ...], controls: tuple[JudgedControl, ...]
) -> tuple[Word, str]:
    if quick:
        return "smoke run: no verdict", "a quick version has too few runs to judge by"
    failed = [control.control.name for control in controls if not control.passed]
    if failed:
        return "void", f"the study says nothing, since a control did not do what it must: {', '.join(failed)}"
    outcomes = {judged.contrast.name: judged.outcome for judged in contrasts}
    needed = {name: outcomes[name] for name in study.verdict.needs}
    if all(outcome == "holds" for outcome in needed.values()):
        return "supported", f"all contrasts that the verdict rests on hold: {', '.join(needed)}"
    refuted = [name for name, outcome in needed.items() if outcome == "refuted"]
    if refuted:
        return "not supported", f"the data say the contrary of {', '.join(refuted)}"
    open_ = [name for name, outcome in needed.items() if outcome != "holds"]
    return "not reproduced at this scale", f"undecided: {', '.join(open_)}"
