"""One self-contained HTML page about one evaluation, or several of the same problems side by side.

Reads ``evaluation.json``, and ``samples.jsonl`` and ``grades.jsonl`` beside it where they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from gspo.errors import DataError, RunDirectoryError
from gspo.report.assets import SCRIPT
from gspo.report.charts import Chart
from gspo.report.page import document, plotly_source, sections, tile
from gspo.report.traces import COLOURS, NEUTRAL, Trace, colour_of

RESULT = "evaluation.json"
#: Problems in the table, and problems with responses, that a page holds.
MAX_PROBLEMS = 1000
MAX_SHOWN = 60
#: Characters of a response or prompt that a page shows.
MAX_CHARACTERS = 6000


@dataclass(frozen=True)
class EvaluationData:
    """An evaluation as it was written."""

    label: str
    path: Path
    fields: Mapping[str, Any]

    @property
    def metrics(self) -> Mapping[str, Any]:
        return dict(self.fields["metrics"])

    @property
    def problems(self) -> list[Mapping[str, Any]]:
        """Per problem; those of a recipe's held-out prompts have numbers for names."""
        if "problems" in self.fields:
            return list(self.fields["problems"])
        counts = enumerate(self.fields.get("outcomes", ()), 1)
        return [{"id": str(i), "num_scored": scored, "num_passed": passed} for i, (scored, passed) in counts]

    @property
    def model(self) -> str:
        found = self.fields.get("model", "")
        return str(found["name"] if isinstance(found, Mapping) else found)


def is_evaluation(path: Path) -> bool:
    """Whether a path is an evaluation rather than a run: a JSON file, or a directory with ``evaluation.json`` alone."""
    if path.is_dir():
        return (path / RESULT).is_file() and not (path / "events.jsonl").exists()
    return path.suffix == ".json"


def write_evaluation_page(paths: Sequence[Path], output: Path) -> Path:
    """Writes the page and returns its path.

    Raises:
        DataError: a path without an evaluation.
        RunDirectoryError: the output cannot be written.
        InputError: plotly is missing.
    """
    page = render_evaluations([load_evaluation(path) for path in paths], plotly_source())
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"cannot write the report to {output}: {error.strerror}") from error
    return output


def load_evaluation(path: Path) -> EvaluationData:
    """An evaluation from its directory or file. Raises DataError if it is none."""
    file = path / RESULT if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: is not an evaluation ({error})") from error
    if not isinstance(fields, dict) or "metrics" not in fields or "num_prompts" not in fields:
        raise DataError(f"{file}: is not an evaluation; gspo eval writes them as {RESULT}")
    return EvaluationData(path.name if path.is_dir() else path.stem, file, fields)


def render_evaluations(evaluations: Sequence[EvaluationData], plotly: str) -> str:
    """The page as text; ``plotly`` is the source of plotly.js."""
    charts = [chart for chart in (_rates_chart(evaluations), _verdicts_chart(evaluations)) if chart.traces]
    first = evaluations[0]
    title = str(first.fields.get("title") or first.fields.get("name"))
    lead = _lead(first) if len(evaluations) == 1 else f"{len(evaluations)} evaluations side by side"
    body = [f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>']
    body.append(_tiles(first) if len(evaluations) == 1 else _comparison(evaluations))
    body += [_notes(evaluations), *sections(charts)]
    for data in evaluations:
        body += [_table(data.label, table) for table in data.fields.get("tables", ())]
    body += [_problem_table(data) for data in evaluations]
    body += [_responses(data) for data in evaluations]
    body += ["<h2>What was measured, and how</h2>", *(_setup(data) for data in evaluations)]
    data_block = {"charts": [{"id": chart.id, "figure": chart.figure()} for chart in charts], "samples": []}
    scripts = [plotly.replace("\r\n", "\n"), SCRIPT] if charts else []
    return document(title, "\n".join(body), data_block, scripts)


# Numbers.


def _lead(data: EvaluationData) -> str:
    fields, protocol = data.fields, data.fields.get("protocol", {})
    parts = [data.model, f"{fields['num_prompts']} problems × {fields['num_samples']} responses"]
    if "temperature" in protocol:
        parts.append(f"temperature {protocol['temperature']:g}")
    if "max_new_tokens" in protocol:
        parts.append(f"at most {protocol['max_new_tokens']} tokens")
    return " · ".join(part for part in parts if part)


def _tiles(data: EvaluationData) -> str:
    metrics, level = data.metrics, _level(data)
    cards = []
    for prefix in _prefixes(metrics):
        of = f", {prefix.rstrip('/')}" if prefix else ""
        interval = f"{_interval(metrics, f'{prefix}pass@1/low', f'{prefix}pass@1/high')}, {level} over problems"
        cards.append(tile(f"pass@1{of}", escape(_share(metrics[f"{prefix}pass@1"])), interval, wide=True))
        bounds = f"{prefix}pass@1/if_unscored"
        if f"{bounds}_wrong" in metrics:
            between = _interval(metrics, f"{bounds}_wrong", f"{bounds}_right")
            cards.append(tile(f"bounds{of}", escape(between), "cells without a verdict all wrong, all right", True))
    cards += [tile(name, escape(_share(metrics[name])), "at least one of k passes") for name in metrics if _is_k(name)]
    cards += [tile(f["name"], escape(f["text"]), f["note"]) for f in data.fields.get("figures", ())]
    if metrics.get("pass@1/standard_error") is not None:
        note = f"with the problems fixed {_points(metrics.get('pass@1/measurement_error'))}"
        cards.append(tile("standard error", escape(_points(metrics["pass@1/standard_error"])), note))
    if metrics.get("pass@1/bootstrap_low") is not None:
        drawn = _interval(metrics, "pass@1/bootstrap_low", "pass@1/bootstrap_high")
        cards.append(tile("bootstrap", escape(drawn), f"BCa over problems, {level}", True))
    for name, note in (
        ("unanswered", "state no answer"),
        ("truncated", "ran into the limit"),
        ("unscored", "could not be judged"),
        ("missing", "were not there"),
    ):
        if f"{name}_fraction" in metrics:
            cards.append(tile(name, escape(_share(metrics[f"{name}_fraction"])), note))
    return f'<div class="tiles">{"".join(cards)}</div>'


def _comparison(evaluations: Sequence[EvaluationData]) -> str:
    """One row per evaluation; which differences are real is for gspo eval compare to say."""
    names = ("unanswered_fraction", "truncated_fraction", "unscored_fraction", "missing_fraction")
    head = ("evaluation", "model", "problems × samples", "pass@1", *(name.partition("_")[0] for name in names))
    rows = []
    for index, data in enumerate(evaluations):
        metrics = data.metrics
        sizes = f"{data.fields['num_prompts']} × {data.fields['num_samples']}"
        interval = _interval(metrics, "pass@1/low", "pass@1/high")
        cells = [data.model, sizes, f"{_share(metrics.get('pass@1'))} ({interval})"]
        cells += [_share(metrics.get(name)) for name in names]
        dot = f'<span class="dot" style="background:{colour_of(index)}"></span>'
        rows.append(f"<tr><td>{dot}{escape(data.label)}</td>{''.join(f'<td>{escape(c)}</td>' for c in cells)}</tr>")
    return _card_table("comparison", head, rows)


def _notes(evaluations: Sequence[EvaluationData]) -> str:
    notes = dict.fromkeys(str(note) for data in evaluations for note in data.fields.get("notes", ()))
    if len({data.fields.get("identity", {}).get("data") for data in evaluations}) > 1:
        notes["These evaluations are not of the same problems: their numbers cannot be compared."] = None
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="card notes">{items}</ul>' if items else ""


def _prefixes(metrics: Mapping[str, Any]) -> list[str]:
    return [name.removesuffix("pass@1") for name in metrics if name == "pass@1" or name.endswith("/pass@1")]


def _is_k(name: str) -> bool:
    return name.startswith("pass@") and "/" not in name and name != "pass@1"


def _level(data: EvaluationData) -> str:
    return f"{100 * data.fields.get('confidence', 0.95):g} %"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _points(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} points"


def _interval(metrics: Mapping[str, Any], low: str, high: str) -> str:
    ends = [metrics.get(low), metrics.get(high)]
    return "–" if None in ends else " to ".join(_share(end) for end in ends)


# Charts.


def _rates_chart(evaluations: Sequence[EvaluationData]) -> Chart:
    """Per problem, in the order of the first evaluation's rates."""
    order = sorted(evaluations[0].problems, key=lambda p: (-_rate(p), str(p["id"])))
    names = [str(problem["id"]) for problem in order]
    traces: list[Trace] = []
    for index, data in enumerate(evaluations):
        rates = {str(p["id"]): _rate(p) for p in data.problems if p["num_scored"]}
        values = [rates.get(name) for name in names]
        run = data.label if len(evaluations) > 1 else None
        shared = {"x": names, "y": values, "name": data.label, "meta": {"run": run, "kind": "pass rate"}}
        colour = COLOURS[0] if run is None else colour_of(index)
        if run is None:
            traces.append({"type": "bar", **shared, "marker": {"color": colour}})
        else:
            line = {"color": colour, "dash": "solid", "width": 1}
            traces.append({"type": "scatter", "mode": "markers", **shared, "line": line, "marker": {"color": colour}})
    caption = "Share of the judged responses that pass, most solved first."
    layout = {"xaxis": {"type": "category", "showticklabels": len(names) <= 40, "tickangle": -60}}
    return Chart("rates", "Result", "Problem by problem", caption, traces, "problem", "pass rate", "fraction", layout)


def _rate(problem: Mapping[str, Any]) -> float:
    return float(problem["num_passed"] / problem["num_scored"]) if problem["num_scored"] else -1.0


def _verdicts_chart(evaluations: Sequence[EvaluationData]) -> Chart:
    """What became of the responses; of one evaluation only."""
    traces: list[Trace] = []
    counts: Counter[str] = Counter()
    if len(evaluations) == 1:
        for problem in evaluations[0].problems:
            counts.update(problem.get("verdicts", {}))
            counts.update({"missing": problem["num_missing"]} if problem.get("num_missing") else {})
    if counts:
        names = [name or "(none)" for name, _ in counts.most_common()]
        traces.append(
            {
                "type": "bar",
                "x": names,
                "y": [count for _, count in counts.most_common()],
                "name": "responses",
                "meta": {"run": None, "kind": "responses"},
                "marker": {"color": [NEUTRAL if name == "missing" else COLOURS[0] for name in names]},
            }
        )
    layout = {"xaxis": {"type": "category"}}
    caption = "By verdict: which rule decided, or how the program ended."
    return Chart("verdicts", "Result", "What became of the responses", caption, traces, "", "responses", layout=layout)


# Tables and texts.


def _card_table(name: str, head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{escape(column)}</th>" for column in head)
    return (
        f'<div class="card scroll" style="margin-top:20px"><table id="{escape(name)}"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(cells: Sequence[Any]) -> str:
    return f"<tr>{''.join(f'<td>{escape(_cell(cell))}</td>' for cell in cells)}</tr>"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def _table(label: str, table: Mapping[str, Any]) -> str:
    """A table of the benchmark's own."""
    rows = [_row(row) for row in table["rows"]]
    note = f'<p class="soft">{escape(table["note"])}</p>' if table.get("note") else ""
    title = str(table["title"])
    return f"<h2>{escape(title)}</h2>\n{note}{_card_table(f'{label} {title}', table['columns'], rows)}"


def _problem_table(data: EvaluationData) -> str:
    problems = data.problems
    dated = any(problem.get("date") for problem in problems)
    head = ["problem", *(["date"] if dated else []), "passed", "judged", "verdicts", "truncated"]
    rows = []
    for problem in problems[:MAX_PROBLEMS]:
        verdicts = ", ".join(f"{name} {count}" for name, count in problem.get("verdicts", {}).items())
        date = [problem.get("date", "")] if dated else []
        counts = [problem["num_passed"], problem["num_scored"]]
        rows.append(_row([problem["id"], *date, *counts, verdicts, problem.get("num_truncated", "")]))
    more = "" if len(problems) <= MAX_PROBLEMS else f" (the first {MAX_PROBLEMS} of {len(problems)})"
    return (
        f'<details class="card" style="margin-top:20px"><summary>{escape(data.label)}: problems{more}</summary>'
        f"{_card_table(f'problems of {data.label}', head, rows)}</details>"
    )


def _responses(data: EvaluationData) -> str:
    """Of each problem one response that passed and one that did not, where the files are there to show them."""
    answers, grades = (_lines(data.path.with_name(name)) for name in ("samples.jsonl", "grades.jsonl"))
    blocks: list[str] = []
    for problem in data.problems:
        pairs = list(zip(answers.get(problem["id"], ()), grades.get(problem["id"], ()), strict=False))
        for passed in (True, False):
            found = next(((answer, grade) for answer, grade in pairs if (grade["value"] == 1) is passed), None)
            if found is not None and len(blocks) < MAX_SHOWN:
                blocks.append(_response(problem["id"], *found))
    if not blocks:
        return ""
    what = "of each problem one that passed and one that did not, where there are such"
    head = f"<h2>Responses, {escape(data.label)}</h2>\n"
    return f'{head}<div class="card"><p class="soft">{what}</p>{"".join(blocks)}</div>'


def _lines(path: Path) -> dict[str, list[Mapping[str, Any]]]:
    """Lists by problem from one of the files that an evaluation keeps; what cannot be read is left out."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    if not path.is_file():
        return found
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break  # cut off while it was written
        if isinstance(record, dict) and "id" in record:
            found[str(record["id"])] = list(record.get("answers") or record.get("grades") or ())
    return found


def _response(problem: str, answer: Mapping[str, Any], grade: Mapping[str, Any]) -> str:
    text = str(answer["text"])
    cut = f"\n[cut: {len(text)} characters]" if len(text) > MAX_CHARACTERS else ""
    facts = [
        grade["verdict"],
        answer.get("stop_reason") or "",
        f"{answer['num_tokens']} tokens" if answer.get("num_tokens") else "",
    ]
    label = " · ".join(part for part in (problem, *facts) if part)
    return (
        f"<details><summary>{escape(label)}</summary><pre>{escape(text[:MAX_CHARACTERS] + cut)}</pre>"
        f'<p class="soft">{escape(str(grade.get("reason", "")))}</p></details>'
    )


def _setup(data: EvaluationData) -> str:
    names = ("model", "protocol", "template", "judge", "data", "files", "identity", "versions")
    parts = [
        f"<h3>{name}</h3><pre>{escape(json.dumps(data.fields[name], indent=2, ensure_ascii=False))}</pre>"
        for name in names
        if name in data.fields
    ]
    return (
        f'<details class="card"><summary>{escape(data.label)}: model, protocol, judge, data and their digests</summary>'
        f'{"".join(parts)}<p class="soft">{escape(str(data.path))}</p></details>'
    )
