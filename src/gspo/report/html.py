"""One self-contained HTML page about one run or several.

Script, data and plotting library are inside the file. Its content security policy lets nothing be fetched and no
other script run, and what models wrote reaches the page as text only.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from gspo.errors import RunDirectoryError
from gspo.report import headline
from gspo.report.assets import SCRIPT
from gspo.report.charts import all_charts
from gspo.report.page import document, plotly_source, sections, tile
from gspo.report.series import RunData, load_runs
from gspo.report.traces import colour_of

#: Sample events of one run that a page holds; more are thinned evenly, the last one stays.
MAX_SAMPLE_EVENTS = 200


def write_report(run_dirs: Sequence[Path], output: Path) -> Path:
    """Writes the page and returns its path.

    Args:
        run_dirs: run directories; several are overlaid.
        output: the file to write; parent directories are made.

    Raises:
        RunDirectoryError: no run given, a path without a run, or an output that cannot be written.
        DataError: damaged events.
        InputError: plotly is missing.
    """
    if not run_dirs:
        raise RunDirectoryError("no run directory was given to report on")
    page = render(load_runs(run_dirs), plotly_source())
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"cannot write the report to {output}: {error.strerror}") from error
    return output


def render(runs: Sequence[RunData], plotly: str) -> str:
    """The page as text; ``plotly`` is the source of plotly.js."""
    charts = all_charts(runs)
    samples = [_thinned(run.of_type("samples")) for run in runs]
    data = {
        "charts": [{"id": chart.id, "figure": chart.figure()} for chart in charts],
        "samples": [[{"step": e["step"], "samples": e["samples"]} for e in events] for events in samples],
    }
    body = [
        _header(runs),
        _headline(runs),
        _notes(runs),
        *sections(charts),
        _samples(runs) if any(samples) else "",
        _setup(runs),
    ]
    scripts = [plotly.replace("\r\n", "\n"), SCRIPT] if charts or any(samples) else []
    return document(", ".join(run.label for run in runs), "\n".join(body), data, scripts)


def _header(runs: Sequence[RunData]) -> str:
    if len(runs) > 1:
        return f"<h1>{len(runs)} runs compared</h1>"
    run = runs[0]
    objective = headline.objective(run)
    lead = " · ".join(
        text for text in (objective.text, objective.note, _batch_arithmetic(run)) if text not in ("", "–")
    )
    return f'<h1>{escape(run.label)}</h1>\n<p class="lead">{escape(lead)}</p>'


def _batch_arithmetic(run: RunData) -> str:
    start = run.start
    prompts, group, updates = (start.get(k) for k in ("prompts_per_step", "group_size", "num_mini_batches"))
    if not prompts or not group or run.only_supervised:
        return ""
    text = f"{prompts} prompts × {group} responses per step"
    return f"{text}, {updates} updates" if updates else text


def _headline(runs: Sequence[RunData]) -> str:
    if all(not run.num_steps_done and not run.of_type("sft") and not run.main_evaluation() for run in runs):
        return '<p class="card empty">No step has been finished yet. Write the report again later.</p>'
    return _table(runs) if len(runs) > 1 else _tiles(runs[0])


def _tiles(run: RunData) -> str:
    before, after = headline.before_after(run)
    change = headline.change(run)
    tiles = []
    if len(run.main_evaluation()) > 1:
        value = f'{escape(before.text)}<span class="arrow">→</span>{escape(after.text)}'
        note = f"{before.note} → {after.note}" if before.note and after.note else ""
        tiles.append(tile("pass@1 on held-out prompts", value, note, wide=True))
        tiles.append(tile("change", escape(change.text), change.note))
    elif before.text != "–":
        tiles.append(tile("pass@1 on held-out prompts", escape(before.text), before.note))
    for name, shown in (
        ("reward in training", headline.last_reward(run)),
        ("responses clipped", headline.clipping(run)),
        ("progress", headline.progress(run)),
        ("time", headline.duration(run)),
    ):
        if shown.text != "–":
            tiles.append(tile(name, escape(shown.text), shown.note))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _table(runs: Sequence[RunData]) -> str:
    names = (
        "run",
        "objective",
        "before",
        "after",
        "change",
        "reward in training",
        "responses clipped",
        "progress",
        "time",
    )
    rows = []
    for index, run in enumerate(runs):
        values = [
            headline.objective(run),
            *headline.before_after(run),
            headline.change(run),
            headline.last_reward(run),
            headline.clipping(run),
            headline.progress(run),
            headline.duration(run),
        ]
        name = f'<td><span class="dot" style="background:{colour_of(index)}"></span>{escape(run.label)}</td>'
        rows.append(f"<tr>{name}{''.join(_cell(value) for value in values)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f'<div class="card scroll" style="margin-top:20px"><table id="comparison"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(value: headline.Value) -> str:
    note = f"<small>{escape(value.note)}</small>" if value.note else ""
    return f"<td>{escape(value.text)}{note}</td>"


def _notes(runs: Sequence[RunData]) -> str:
    """Warnings, audit findings, torn files, unhappy ends: each once, with how often it came."""
    found: dict[str, int] = {}
    for run in runs:
        prefix = f"{run.label}: " if len(runs) > 1 else ""
        texts = [str(finding) for event in run.of_type("audit") for finding in event["findings"]]
        texts += [str(event["message"]) for event in run.of_type("warning")]
        texts += [run.log.torn] if run.log.torn else []
        if run.end and run.end["status"] != "finished":
            texts.append(f"ended as {run.end['status']}. {run.end.get('message') or ''}".strip())
        for text in texts:
            found[prefix + text] = found.get(prefix + text, 0) + 1
    if not found:
        return ""
    items = (f"<li>{escape(text)}{f' ({count} times)' if count > 1 else ''}</li>" for text, count in found.items())
    return f'<ul class="card notes">{"".join(items)}</ul>'


def _samples(runs: Sequence[RunData]) -> str:
    options = "".join(f"<option>{escape(run.label)}</option>" for run in runs)
    choice = f'<select id="sample-run" aria-label="run">{options}</select>' if len(runs) > 1 else ""
    return (
        '<h2>Sample answers</h2>\n<div class="card" id="samples"><div class="controls">'
        f'{choice}<button id="sample-back" aria-label="earlier step">←</button>'
        '<input type="range" id="sample-step" min="0" value="0" aria-label="step">'
        '<button id="sample-next" aria-label="later step">→</button><output id="sample-label"></output></div>'
        '<div class="samples" id="sample-cards"></div></div>'
    )


def _setup(runs: Sequence[RunData]) -> str:
    blocks = []
    for run in runs:
        command = " ".join(map(str, run.info.get("command", ())))
        facts = {**run.info.get("versions", {}), **run.info.get("host", {}), "seed": run.info.get("seed", "unknown")}
        rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in facts.items())
        blocks.append(
            f'<details class="card"><summary>{escape(run.label)}: configuration and versions</summary>'
            f"<h3>Command</h3><pre>{escape(command or 'not recorded')}</pre>"
            f"<h3>Recipe, resolved</h3><pre>{escape(run.config_text or 'not recorded')}</pre>"
            f"<h3>Versions and host</h3><table>{rows}</table>"
            f'<p class="soft">{escape(str(run.path))}</p></details>'
        )
    return "<h2>Set-up</h2>\n" + "\n".join(blocks)


def _thinned(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(events) <= MAX_SAMPLE_EVENTS:
        return list(events)
    last = len(events) - 1
    return [events[round(i * last / (MAX_SAMPLE_EVENTS - 1))] for i in range(MAX_SAMPLE_EVENTS)]
