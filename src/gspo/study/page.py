"""The page of a study, twice: Markdown with SVG figures for the repository, one self-contained HTML file to look at.

Both say the same: claim, what the paper showed, the regime, what was measured, controls, verdict, deviations, how to
run it again, and exploration apart from the rest.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from gspo.errors import RunDirectoryError
from gspo.evals.statistics import Interval
from gspo.report.assets import SCRIPT
from gspo.report.charts import Chart
from gspo.report.page import document, plotly_source, sections, tile
from gspo.report.traces import Trace
from gspo.study.collect import results_text
from gspo.study.figures import Drawing, by_label, draw
from gspo.study.judge import JudgedContrast, Judgement, judge
from gspo.study.schema import Results, Study
from gspo.study.svg import number, svg

_SYMBOL = {"greater": ">", "less": "<", "different": "≠", "equivalent": "≈"}


def drawings(study: Study, results: Results, judgement: Judgement) -> list[Drawing]:
    """The figures that have something to show."""
    found = [draw(study, results, figure, judgement.excluded) for figure in study.figures]
    return [drawing for drawing in found if not drawing.empty]


def publish_pages(study: Study, results: Results, folder: Path) -> Path:
    """Writes ``NAME.md``, and beside it ``NAME/`` with the figures and results.json; returns the page.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    judgement = judge(study, results)
    drawn = drawings(study, results, judgement)
    page, beside = folder / f"{study.name}.md", folder / study.name
    try:
        beside.mkdir(parents=True, exist_ok=True)
        for drawing in drawn:
            (beside / f"{drawing.figure.id}.svg").write_text(svg(drawing), encoding="utf-8")
        (beside / "results.json").write_text(results_text(results), encoding="utf-8")
        page.write_text(markdown(study, results, judgement, drawn), encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"cannot write the page of study {study.name} to {folder}: {error.strerror}") from error
    return page


# Markdown.


def markdown(study: Study, results: Results, judgement: Judgement, drawn: Sequence[Drawing]) -> str:
    """The page as Markdown; its figures are in the folder of the study's name."""
    blocks = [
        f"# {study.title}",
        "<!-- written by gspo study report; the text comes from the study's file -->",
        f"**Claim.** {study.claim}",
        f"**Verdict: {judgement.word}** ({judgement.reason}).",
        *(_md_figure(study, drawing) for drawing in drawn if drawing.figure.main),
        f"## What the paper showed\n\n{study.paper.says} ({study.paper.source})",
        f"## Regime\n\n{study.regime.strip()}",
        _md_runs(study, results, judgement),
        f"## What was measured\n\n{_md_contrasts(study, judgement.contrasts)}",
        _md_arms(study, results, judgement),
        *(_md_figure(study, drawing) for drawing in drawn if not drawing.figure.main),
        f"## Controls\n\n{_md_controls(judgement)}",
        f"## How it is judged\n\n{_how_judged(study)}",
        f"## Deviations\n\n{study.deviations.strip()}" if study.deviations else "",
        f"## Run it again\n\n{_again(study, results)}",
        f"## Exploration, not part of the verdict\n\n{study.exploration.text.strip()}" if study.exploration else "",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _md_figure(study: Study, drawing: Drawing) -> str:
    figure = drawing.figure
    return f"### {figure.title}\n\n![{figure.title}]({study.name}/{figure.id}.svg)\n\n{figure.caption}"


def _md_runs(study: Study, results: Results, judgement: Judgement) -> str:
    seeds = sorted({run.cell.seed for run in results.runs})
    seconds = sum(run.seconds for run in results.runs)
    text = (
        f"{judgement.num_runs} runs ({len(seeds)} seeds), together {seconds / 60:.0f} minutes with one thread "
        f"each; {judgement.num_failed} ended with an error of their own."
    )
    for seed, reason in judgement.excluded.items():
        text += f" Seed {seed} is left out: {reason}."
    return text


def _md_contrasts(study: Study, contrasts: Sequence[JudgedContrast]) -> str:
    share = f"{100 * study.confidence:g} %"
    rows = [
        f"| planned contrast | estimate [{share}] | tested | p (Holm) | seeds on that side | |",
        "|---|---|---|---|---|---|",
    ]
    for judged in contrasts:
        rows.append(f"| {judged.contrast.says} | {' | '.join(_contrast_cells(judged))} |")
    return "\n".join(rows)


def _contrast_cells(judged: JudgedContrast) -> list[str]:
    contrast = judged.contrast
    if judged.interval is None:
        return ["", _tested(judged), "", "", "no data"]
    return [
        interval_text(judged.interval),
        _tested(judged),
        f"{p_text(judged.p_value)} ({p_text(judged.adjusted)})",
        f"{judged.num_holding} of {len(judged.differences)}",
        f"**{judged.outcome}**" if contrast.name else judged.outcome,
    ]


def _tested(judged: JudgedContrast) -> str:
    contrast = judged.contrast
    margin = f" ± {contrast.margin:g}" if contrast.margin is not None else ""
    return f"{_SYMBOL[contrast.alternative]} {contrast.null:g}{margin}"


def interval_text(interval: Interval) -> str:
    """``0.045 [-0.02, 0.11]``, in signs that need no more than three digits."""
    ends = (interval.low, interval.high)
    shown = ", ".join(f"{end:.3g}" if math.isfinite(end) else "?" for end in ends)
    return f"{interval.value:.3g} [{shown}]"


def p_text(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _md_arms(study: Study, results: Results, judgement: Judgement) -> str:
    """Means of the measures over seeds, a row for each arm at each of its levels."""
    rows = [
        "| arm | runs | " + " | ".join(measure.label for measure in study.measures) + " |",
        "|---|---|" + "---|" * len(study.measures),
    ]
    counted = [run for run in results.runs if run.cell.seed not in judgement.excluded]
    for label, runs in by_label(study, counted).items():
        cells = []
        for measure in study.measures:
            values = [run.scalars.get(measure.name) for run in runs]
            known = [value for value in values if value is not None]
            cells.append(f"{sum(known) / len(known):.3g}" if known else "")
        rows.append(f"| {label} | {len(runs)} | {' | '.join(cells)} |")
    return "Means over seeds:\n\n" + "\n".join(rows)


def _md_controls(judgement: Judgement) -> str:
    if not judgement.controls:
        return "None."
    lines = []
    for judged in judgement.controls:
        control = judged.control
        value = "no data" if judged.value is None else f"{judged.value:.3g}"
        lines.append(
            f"- {control.says}: {value}, {_bounds(control.low, control.high)}: "
            f"{'passed' if judged.passed else '**failed**'}"
        )
    return "\n".join(lines)


def _bounds(low: float, high: float) -> str:
    if math.isinf(low):
        return f"at most {high:g} needed"
    return f"at least {low:g} needed" if math.isinf(high) else f"{low:g} to {high:g} needed"


def _how_judged(study: Study) -> str:
    needed = ", ".join(f"`{name}`" for name in study.verdict.needs)
    return (
        "Contrasts, thresholds and this rule stood in the study's file before the first confirmatory run. The unit is "
        "the seed: all arms of a seed start from the same weights, and levels are averaged within a seed. p-values are "
        "exact sign-flip permutations over seeds, adjusted by Holm over all planned contrasts; ≈ stands for two "
        "one-sided tests. Intervals are bootstraps over seeds. A control that fails voids the study. Supported: "
        f"{needed} hold at {study.alpha:g}. Not supported: the contrary of one of them holds. Otherwise it is not "
        "reproduced at this scale, which is no evidence against it."
    )


def _again(study: Study, results: Results) -> str:
    host = ", ".join(f"{key} {value}" for key, value in {**results.versions, **results.host}.items())
    return (
        f"```\ngspo study run {study.name}\ngspo study report {study.name}\n```\n\n"
        f"Judged again from the numbers alone, without running:\n\n"
        f"```\ngspo study report {study.name} --results docs/studies/{study.name}/results.json\n```\n\n"
        f"Study file {results.digest}; {host}."
    )


# HTML.


def html_page(study: Study, results: Results) -> str:
    """The page as one file with plotly's figures."""
    judgement = judge(study, results)
    charts = [_chart(drawing) for drawing in drawings(study, results, judgement)]
    data = {"charts": [{"id": chart.id, "figure": chart.figure()} for chart in charts], "samples": []}
    body = [
        f'<h1>{html.escape(study.title)}</h1>\n<p class="lead">{html.escape(study.claim)}</p>',
        _tiles(judgement),
        _contrast_table(study, judgement),
        *sections(charts),
        _prose("What the paper showed", f"{study.paper.says} ({study.paper.source})"),
        _prose("Regime", study.regime),
        _prose("Runs", _md_runs(study, results, judgement)),
        _prose("Controls", _md_controls(judgement).replace("**", "").replace("\n", "\n\n")),
        _prose("How it is judged", _how_judged(study).replace("`", "")),
        _prose("Deviations", study.deviations),
        _prose("Run it again", f"gspo study run {study.name}. Study file {results.digest}."),
        _prose("Exploration, not part of the verdict", study.exploration.text if study.exploration else ""),
    ]
    scripts = [plotly_source().replace("\r\n", "\n"), SCRIPT] if charts else []
    return document(study.title, "\n".join(part for part in body if part), data, scripts)


def _tiles(judgement: Judgement) -> str:
    passed = sum(control.passed for control in judgement.controls)
    held = sum(judged.outcome == "holds" for judged in judgement.contrasts)
    tiles = [
        tile("verdict", html.escape(judgement.word), judgement.reason, wide=True),
        tile("contrasts that hold", f"{held} of {len(judgement.contrasts)}", "after Holm's adjustment"),
        *([tile("controls passed", f"{passed} of {len(judgement.controls)}", "")] if judgement.controls else []),
        tile("runs", str(judgement.num_runs), f"{judgement.num_failed} failed"),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _contrast_table(study: Study, judgement: Judgement) -> str:
    names = ("planned contrast", f"estimate [{100 * study.confidence:g} %]", "tested", "p (Holm)", "seeds", "outcome")
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = []
    for judged in judgement.contrasts:
        cells = [judged.contrast.says, *(cell.replace("**", "") for cell in _contrast_cells(judged))]
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return (
        '<h2>What was measured</h2>\n<div class="card scroll"><table><thead><tr>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _prose(title: str, text: str) -> str:
    """A card of paragraphs; single line breaks are those of the file and mean nothing."""
    if not text:
        return ""
    paragraphs = "".join(f"<p>{html.escape(part)}</p>" for part in text.strip().split("\n\n"))
    return f'<h2>{html.escape(title)}</h2>\n<div class="card">{paragraphs}</div>'


def _chart(drawing: Drawing) -> Chart:
    figure = drawing.figure
    traces: list[Trace] = []
    for line in drawing.lines:
        meta = {"run": line.label, "kind": "mean"}
        style = {"color": line.colour, "dash": "solid", "width": 2}
        shared: Trace = {"type": "scatter", "name": line.label, "meta": meta, "marker": {"color": line.colour}}
        for seed in line.faint:
            faint = shared | {"line": style | {"width": 1}, "opacity": 0.25, "mode": "lines", "hoverinfo": "skip"}
            traces.append(faint | {"x": [x for x, _ in seed], "y": [y for _, y in seed]})
        if line.dots:
            dots = shared | {"mode": "markers", "opacity": 0.45, "line": style}
            traces.append(dots | {"x": [x for x, _ in line.dots], "y": [y for _, y in line.dots]})
        mean = shared | {"mode": "lines+markers", "line": style}
        trace = mean | {"x": [x for x, _ in line.points], "y": [y for _, y in line.points]}
        if any(line.bars):
            trace["error_y"] = _error_bars(line.points, line.bars, line.colour)
        traces.append(trace)
    layout: dict[str, object] = {"xaxis": _x_axis(drawing)}
    if figure.log_y:
        ys = [y for line in drawing.lines for _, y in (*line.points, *line.dots)]
        decades = math.log10(max(ys) / min(ys)) if ys else 0.0
        layout["yaxis"] = {"type": "log", "exponentformat": "power", "dtick": 1 if decades > 1.5 else "D2"}
    return Chart(
        figure.id, "Figures", figure.title, figure.caption, traces, figure.x_title, figure.y_title, layout=layout
    )


def _x_axis(drawing: Drawing) -> dict[str, object]:
    xs = [x for line in drawing.lines for x, _ in line.points]
    if drawing.ticks:
        return {"tickvals": list(range(len(drawing.ticks))), "ticktext": list(drawing.ticks)}
    if drawing.figure.log_x:
        values = sorted(set(xs))
        shown = values if len(values) <= 6 else None
        return {"type": "log", "tickvals": shown, "ticktext": [number(v) for v in shown or ()] or None}
    return {"dtick": 1} if xs and max(xs) - min(xs) <= 6 and all(x == int(x) for x in xs) else {}


def _error_bars(
    points: Sequence[tuple[float, float]], bars: Sequence[tuple[float, float] | None], colour: str
) -> dict[str, object]:
    ends = [bar or (y, y) for (_, y), bar in zip(points, bars, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - y if math.isfinite(high) else 0.0 for (_, y), (_, high) in zip(points, ends, strict=True)],
        "arrayminus": [y - low if math.isfinite(low) else 0.0 for (_, y), (low, _) in zip(points, ends, strict=True)],
        "color": colour,
        "thickness": 1.5,
        "width": 4,
    }
