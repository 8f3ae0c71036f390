"""What a chart shows, whoever draws it."""

from __future__ import annotations

import math
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
    """``"bytes"`` has marks at powers of two, written as 4 KiB; ``"us"`` at 1, 2, 5, written as 200 µs or 5 ms."""


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


def x_marks(low: float, high: float, unit: str, most: int = 9) -> list[float]:
    """Give at most so many round values between two positive ones, evenly far apart on a logarithmic axis."""
    if unit == "bytes":
        first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
        every = max(1, math.ceil((last - first + 1) / most))
        return [2.0**power for power in range(first, last + 1, every)]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [round(factor * 10.0**power, 12) for power in decades for factor in (1, 2, 5)]
    inside = [mark for mark in found if low <= mark <= high]
    if len(inside) > most:
        inside = [10.0**power for power in decades if low <= 10.0**power <= high]
    return inside[:: max(1, math.ceil(len(inside) / most))]


def mark_text(value: float, unit: str) -> str:
    """Write the value of a mark on an axis."""
    if unit == "bytes":
        for name, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value >= factor:
                return f"{value / factor:g} {name}"
        return f"{value:g} B"
    if unit == "us":
        for label, micros in (("s", 1e6), ("ms", 1e3)):
            if value >= micros:
                return f"{value / micros:g} {label}"
        return f"{value:g} µs"
    return f"{value:g}"
