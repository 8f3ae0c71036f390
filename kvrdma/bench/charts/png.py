"""Draws the same charts into one picture, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrdma.bench.charts.model import COLOURS, PARTS, BarChart, Chart, mark_text, x_marks
from kvrdma.bench.charts.svg import MARKED
from kvrdma.errors import ConfigError


def write_png(charts: Sequence[Chart], path: Path) -> None:
    """Write all charts below one another.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"a PNG needs matplotlib ({error}): pip install 'kvrdma[report]'") from error
    figure = Figure(figsize=(8, 4.2 * len(charts)), dpi=120, layout="constrained")
    for axes, chart in zip(figure.subplots(len(charts), 1, squeeze=False)[:, 0], charts, strict=True):
        axes.set_title(chart.title)
        axes.set_ylabel(chart.y_label)
        axes.grid(axis="y", alpha=0.3)
        _draw(axes, chart)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))  # never over the data
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # matplotlib: a format that it cannot write
        raise ConfigError(f"{path}: the picture cannot be written: {error}") from error


def _plain(text: str) -> str:
    """Keep matplotlib from reading names of files as formulas, or hiding them."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _draw(axes: Any, chart: Chart) -> None:  # noqa: ANN401 - matplotlib's
    if isinstance(chart, BarChart):
        base = [0.0] * len(chart.labels)
        for name, heights in chart.parts.items():
            axes.bar(
                [_plain(label) for label in chart.labels],
                heights,
                0.6,
                bottom=base,
                label=name,
                color=COLOURS[PARTS.index(name)],
            )
            base = [low + height for low, height in zip(base, heights, strict=True)]
        return
    for series in chart.series:
        style = "--" if series.dashed else "-"
        marker = "o" if len(series.x) <= MARKED else ""
        colour = COLOURS[series.colour % len(COLOURS)]
        axes.plot(series.x, series.y, style, marker=marker, label=_plain(series.name), color=colour)
    axes.set_xscale("log", base=2)
    low, high = axes.get_xlim()
    axes.set_xticks(x_marks(low, high, chart.x_unit))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: mark_text(value, chart.x_unit))
    axes.set_xlabel(chart.x_label)
    axes.set_ylim(bottom=0)
