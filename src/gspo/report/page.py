"""What every page of ours is made of: the document with its policy, tiles, cards of charts."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gspo.errors import InputError
from gspo.report.assets import CSS
from gspo.report.charts import Chart
from gspo.report.traces import KeyEntry


def document(title: str, body: str, data: Mapping[str, Any], scripts: Sequence[str]) -> str:
    """A whole page; ``body`` is HTML, ``data`` is what ``scripts`` read."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    # Only the first closes the data block, so no "<" of a model's answer may stay as it is.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>",
            body,
            "</main>",
            f'<script type="application/json" id="page-data">{text}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        ]
    )


def tile(name: str, value_html: str, note: str, wide: bool = False) -> str:
    """One number in a card; only ``value_html`` is HTML."""
    return (
        f'<div class="card tile{" wide" if wide else ""}"><div class="name">{escape(name)}</div>'
        f'<div class="value">{value_html}</div><div class="note">{escape(note)}</div></div>'
    )


def sections(charts: Sequence[Chart]) -> list[str]:
    """The cards of the charts, under the heading of their section."""
    parts = []
    for section in dict.fromkeys(chart.section for chart in charts):
        cards = "".join(
            f'<section class="card chart" id="chart-{chart.id}"><h3>{escape(chart.title)}</h3>'
            f'<p>{escape(chart.caption)}</p>{_key(chart)}<div class="plot" id="plot-{chart.id}"></div></section>'
            for chart in charts
            if chart.section == section
        )
        parts.append(f'<h2>{escape(section)}</h2>\n<div class="grid">{cards}</div>')
    return parts


def _key(chart: Chart) -> str:
    """The legend above a plot: buttons that hide and show what they stand for."""
    entries = chart.key()
    if not entries:
        return ""
    buttons = (
        f'<button data-field="{entry.field}" data-value="{escape(entry.value)}">'
        f"{_swatch(entry)}{escape(entry.value)}</button>"
        for entry in entries
    )
    return f'<div class="key" data-chart="{chart.id}">{"".join(buttons)}</div>'


def _swatch(entry: KeyEntry) -> str:
    colour = entry.colour or "currentColor"
    if entry.dash is None:
        opacity = 1 if entry.colour else 0.3
        drawn = f'<rect width="22" height="10" rx="2" fill="{colour}" opacity="{opacity}"/>'
    else:
        pattern = {"dot": "2 3", "dash": "6 4", "dashdot": "6 3 2 3", "longdash": "10 4"}.get(entry.dash, "none")
        drawn = f'<line x2="22" y1="5" y2="5" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{pattern}"/>'
    return f'<svg width="22" height="10" aria-hidden="true">{drawn}</svg>'


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def plotly_source() -> str:
    """The source of plotly.js.

    Raises:
        InputError: plotly is missing.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise InputError("the report draws with plotly, which is not installed: pip install 'gspo[report]'") from error
    return str(get_plotlyjs())
