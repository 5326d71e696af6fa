"""A figure as SVG text: the same bytes for the same numbers, readable on a light and on a dark page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from gspo.study.figures import Drawing, Line, Point

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 74, 18, 18, 54
_STYLE = """<style>
text { font: 13px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #5d6069 }
.page { fill: #ffffff } .grid { stroke: #ececea } .frame { stroke: #c9c9c4; fill: none }
@media (prefers-color-scheme: dark) {
  text { fill: #a0a3ac } .page { fill: #1b1d21 } .grid { stroke: #2a2d33 } .frame { stroke: #4a4e57 }
}
</style>"""


class _Axis:
    """Maps values to pixels; ticks at round values."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool, from_zero: bool) -> None:
        self.log, self.start, self.end = log, start, end
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if log:
            low, high = math.log10(low), math.log10(high)
        elif from_zero and low >= 0:
            low = 0.0
        if high - low < 1e-12 * max(1.0, abs(high)):
            low, high = low - 0.5, high + 0.5
        margin = 0.04 * (high - low)
        self.low = low if low == 0.0 and not log else low - margin
        self.high = high + margin

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, whole: bool = False) -> list[float]:
        """Round values; ``whole``: of an axis that counts something."""
        if not self.log:
            found = linear_ticks(self.low, self.high)
            return [value for value in found if value == int(value)] if whole else found
        first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
        steps = (1.0,) if last - first >= 2 else (1.0, 2.0, 5.0)
        found = [s * 10.0**e for e in range(first - 1, last + 2) for s in steps]
        return [value for value in found if self.low <= math.log10(value) <= self.high]


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between the ends, at most so many.

    >>> linear_ticks(0.0, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8]
    """
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    while (high - low) / step > most:
        step *= 2.5 if f"{step:e}".startswith("2") else 2
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def svg(drawing: Drawing) -> str:
    """The figure with its legend below the title row; no script, nothing fetched."""
    figure, lines = drawing.figure, drawing.lines
    legend = _legend(drawing)
    top = TOP + 22 * (legend.count("<g ") if legend else 0)
    xs = [x for line in lines for x, _ in _all(line)]
    ys = [y for line in lines for _, y in _all(line)] + [
        end for line in lines for bar in line.bars if bar for end in bar if math.isfinite(end)
    ]
    ys = [y for y in ys if not figure.log_y or y > 0]
    bottom = BOTTOM + (46 if drawing.ticks else 0)
    height = HEIGHT + top - TOP + (46 if drawing.ticks else 0)
    x = _Axis([-0.5, len(drawing.ticks) - 0.5] if drawing.ticks else xs, LEFT, WIDTH - RIGHT, figure.log_x, False)
    y = _Axis(ys, height - bottom, top, figure.log_y, True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape(figure.title)}">',
        _STYLE,
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
        legend,
        *_grid(drawing, x, y, top, height - bottom),
        *(part for line in lines for part in _line(line, x, y)),
        _text(f"translate({(LEFT + WIDTH - RIGHT) / 2:.1f} {height - 12})", figure.x_title),
        _text(f"translate(18 {(top + height - bottom) / 2:.1f}) rotate(-90)", figure.y_title),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _text(transform: str, text: str) -> str:
    return f'<text transform="{transform}" text-anchor="middle">{escape(text)}</text>'


def _all(line: Line) -> list[Point]:
    return [*line.points, *line.dots, *(point for seed in line.faint for point in seed)]


def _legend(drawing: Drawing) -> str:
    """Entries in rows as wide as the figure; a strip names its arms below the axis instead."""
    if drawing.ticks or len(drawing.lines) < 2:
        return ""
    rows: list[list[str]] = [[]]
    at = float(LEFT)
    for line in drawing.lines:
        width = 46 + 7.0 * len(line.label)
        if at + width > WIDTH - RIGHT and rows[-1]:
            rows.append([])
            at = float(LEFT)
        y = 18 + 22 * (len(rows) - 1)
        rows[-1].append(
            f'<line x1="{at:.1f}" x2="{at + 20:.1f}" y1="{y - 4}" y2="{y - 4}" stroke="{line.colour}" '
            f'stroke-width="3"/><text x="{at + 26:.1f}" y="{y}">{escape(line.label)}</text>'
        )
        at += width
    return "\n".join(f'<g class="key">{"".join(row)}</g>' for row in rows)


def _grid(drawing: Drawing, x: _Axis, y: _Axis, top: float, bottom: float) -> list[str]:
    parts = []
    for value in y.ticks():
        at = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>')
    if drawing.ticks:
        for index, label in enumerate(drawing.ticks):
            place = f"translate({x(index):.1f} {bottom + 14:.1f})"
            turned = " rotate(-24)" if len(drawing.ticks) > 4 else ""
            anchor = "end" if turned else "middle"
            parts.append(f'<text transform="{place}{turned}" text-anchor="{anchor}">{escape(label)}</text>')
    else:
        whole = all(a == int(a) for line in drawing.lines for a, _ in line.points)
        for value in x.ticks(whole):
            at = x(value)
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
            parts.append(f'<text x="{at:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{number(value)}</text>')
    width = WIDTH - RIGHT - LEFT
    parts.append(f'<rect class="frame" x="{LEFT}" y="{top:.1f}" width="{width}" height="{bottom - top:.1f}"/>')
    return parts


def number(value: float) -> str:
    """A tick's label.

    >>> number(0.0), number(0.25), number(3e-4), number(10000.0)
    ('0', '0.25', '3e-4', '10000')
    """
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.6g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _line(line: Line, x: _Axis, y: _Axis) -> list[str]:
    parts = [_polyline(seed, x, y, line.colour, 1.0, 0.22) for seed in line.faint if len(seed) > 1]
    for a, b in line.dots:
        parts.append(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5" fill="{line.colour}" fill-opacity="0.45"/>')
    for (a, _), bar in zip(line.points, line.bars, strict=False):
        if bar is None or not all(math.isfinite(end) and (not y.log or end > 0) for end in bar):
            continue
        parts.append(
            f'<line x1="{x(a):.1f}" x2="{x(a):.1f}" y1="{y(bar[0]):.1f}" y2="{y(bar[1]):.1f}" '
            f'stroke="{line.colour}" stroke-width="1.5"/>'
        )
    if len(line.points) > 1:
        parts.append(_polyline(line.points, x, y, line.colour, 2.2, 1.0))
    if len(line.points) <= 12:
        parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="4.5" fill="{line.colour}"/>' for a, b in line.points]
    return parts


def _polyline(points: Sequence[Point], x: _Axis, y: _Axis, colour: str, width: float, opacity: float) -> str:
    text = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
    return (
        f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}" '
        'stroke-linejoin="round"/>'
    )
