"""Draws charts as SVG elements for a page: no script, no font, nothing to load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from kvrdma.bench.charts.model import PARTS, BarChart, Chart, LineChart, Series, mark_text, x_marks

_WIDTH, _HEIGHT = 640, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 28, 16, 52
MARKED = 16
"""A line of at most so many points shows them."""
_PLOT_W, _PLOT_H = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM


def draw(chart: Chart) -> str:
    """Give a ``<figure>`` with the chart, its title and its legend."""
    body, legend = _lines(chart) if isinstance(chart, LineChart) else _bars(chart)
    return (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.title)}">{body}</svg>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def nice_marks(most: float, count: int = 5) -> list[float]:
    """Give about ``count`` round values from 0 to just above ``most``."""
    if most < 1e-9:
        return [0.0, 1.0]
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [round(step * i, 12) for i in range(math.ceil(most / step - 1e-9) + 1)]


def _y_axis(marks: Sequence[float], label: str) -> str:
    lines = []
    for mark in marks:
        y = _y(mark, marks[-1])
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="mark" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    middle = _TOP + _PLOT_H / 2
    lines.append(
        f'<text class="label" x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle">'
        f"{escape(label)}</text>"
    )
    return "".join(lines)


def _y(value: float, most: float) -> float:
    return _TOP + _PLOT_H * (1 - value / most)


def _x_label(label: str) -> str:
    return (
        f'<text class="label" x="{_LEFT + _PLOT_W / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(label)}</text>'
    )


def _lines(chart: LineChart) -> tuple[str, str]:
    xs = [x for series in chart.series for x in series.x if x > 0]
    low, high = math.log2(min(xs)), math.log2(max(xs))
    low, high = (low - 1, high + 1) if high - low < 2 else (low, high)  # so that there are marks

    def at(x: float) -> float:
        return _LEFT + _PLOT_W * (math.log2(max(x, 1e-12)) - low) / (high - low)

    marks = nice_marks(max(y for series in chart.series for y in series.y))
    parts = [_y_axis(marks, chart.y_label), _x_label(chart.x_label)]
    for mark in x_marks(2.0**low, 2.0**high, chart.x_unit):
        text = escape(mark_text(mark, chart.x_unit))
        parts.append(f'<text class="mark" x="{at(mark):.1f}" y="{_HEIGHT - 32}" text-anchor="middle">{text}</text>')
    parts += [_line(series, at, marks[-1], chart.x_unit) for series in chart.series]
    legend = "".join(
        f'<li><svg viewBox="0 0 28 10" aria-hidden="true"><line class="{_kind(s)}" x1="1" x2="27" y1="5" y2="5"/></svg>'
        f"{escape(s.name)}</li>"
        for s in chart.series
    )
    return "".join(parts), legend


def _kind(series: Series) -> str:
    return f"c{series.colour}{' dashed' if series.dashed else ''}"


def _line(series: Series, at: Callable[[float], float], most: float, unit: str) -> str:
    places = [(at(x), _y(y, most)) for x, y in zip(series.x, series.y, strict=True)]
    path = " ".join(f"{'M' if i == 0 else 'L'}{x:.1f},{y:.1f}" for i, (x, y) in enumerate(places))
    parts = [f'<path class="{_kind(series)}" d="{path}"/>']
    if len(places) <= MARKED:
        parts += [
            f'<circle class="c{series.colour}" cx="{px:.1f}" cy="{py:.1f}" r="4"><title>{escape(series.name)}: '
            f"{y:.3g} at {escape(mark_text(x, unit))}</title></circle>"
            for (px, py), x, y in zip(places, series.x, series.y, strict=True)
        ]
    return "".join(parts)


def _bars(chart: BarChart) -> tuple[str, str]:
    count = len(chart.labels)
    sums = [sum(heights[i] for heights in chart.parts.values()) for i in range(count)]
    marks = nice_marks(max(sums, default=1.0))
    parts = [_y_axis(marks, chart.y_label)]
    each = _PLOT_W / max(1, count)
    width = min(72.0, each * 0.6)
    for i, label in enumerate(chart.labels):
        middle, base = _LEFT + each * (i + 0.5), 0.0
        for name, heights in chart.parts.items():
            height = heights[i]
            top, bottom = _y(base + height, marks[-1]), _y(base, marks[-1])
            if height > 0:
                tip = f"<title>{escape(label)}, {escape(name)}: {height:.3g}</title>"
                place = f'x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}"'
                place += f' height="{max(0.0, bottom - top - 1):.1f}"'
                parts.append(f'<rect class="c{PARTS.index(name)}" {place}>{tip}</rect>')
            base += height
        for row, words in enumerate(_two_lines(label)):
            y = _HEIGHT - 34 + 14 * row
            parts.append(f'<text class="mark" x="{middle:.1f}" y="{y}" text-anchor="middle">{escape(words)}</text>')
    legend = "".join(
        f'<li><svg viewBox="0 0 12 12"><rect class="c{PARTS.index(name)}" width="12" height="12"/></svg>'
        f"{escape(name)}</li>"
        for name in chart.parts
    )
    return "".join(parts), legend


def _two_lines(label: str) -> list[str]:
    first, _, second = label.partition("\n")
    return [first, second]
