"""What a chart shows, whoever draws it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points in order of x."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    colour: int
    """Index of a colour; series that are alike in one respect share it."""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over a logarithmic x axis."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_unit: str = ""
    """``"bytes"`` writes marks as 4 KiB."""


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars made of parts, one above the other."""

    title: str
    y_label: str
    labels: tuple[str, ...]
    parts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Part to its height in each bar."""


Chart: TypeAlias = LineChart | BarChart
PARTS = ("plan", "post", "wait", "reshape")
"""Parts of a bar, each of one colour wherever it is drawn."""
COLOURS = ("#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#0e7490")
"""Told apart by people with any colour vision, on light and dark ground; in this order."""


def mark_text(value: float, unit: str) -> str:
    """Write the value of a mark on an axis."""
    if unit == "bytes":
        for name, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value >= factor:
                return f"{value / factor:g} {name}"
        return f"{value:g} B"
    return f"{value:g}"
