"""Whether strided pieces of memory share bytes: pure arithmetic on addresses, strides and counts.

A piece is a run of bytes repeated along nested axes. The answer errs to one side: pieces that lie among each
other but step differently, which no cache does, count as sharing bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

Label = TypeVar("Label")

Axis = tuple[int, int]
"""Stride and count."""

_MAX_PAIRS = 1 << 16


class Piece(NamedTuple):
    """Runs of ``width`` bytes at ``start`` plus multiples of the axes' strides; outermost axis first."""

    start: int
    axes: tuple[Axis, ...]
    width: int

    @property
    def extent(self) -> int:
        """Bytes from the first to the last."""
        return self.width + sum(stride * (count - 1) for stride, count in self.axes)

    def inside(self, start: int) -> Piece:
        """One index of the outermost axis."""
        return Piece(start, self.axes[1:], self.width)


def nested(start: int, axes: Iterable[Axis], width: int) -> Piece | Axis:
    """Order the axes of a piece; or name the stride that is too short, and the bytes inside it.

    Contiguous inner axes become part of the width, axes of one index vanish.
    """
    outer: list[Axis] = []
    reach = width
    for stride, count in sorted(axis for axis in axes if axis[1] > 1):
        if stride < reach:
            return stride, reach
        if stride == width and not outer:
            width *= count
        else:
            outer.insert(0, (stride, count))
        reach += stride * (count - 1)
    return Piece(start, tuple(outer), width)


def shared(pieces: Iterable[tuple[Piece, Label]]) -> tuple[Label, Label] | None:
    """The labels of two pieces with a byte in common; None if there are none."""
    ordered = sorted(pieces, key=lambda item: item[0].start)
    found = _maybe_shared(ordered)
    if found is None:
        return None
    left = _MAX_PAIRS  # the quick look may see two ends of a chain of pieces as one: look at the pairs themselves
    active: list[tuple[Piece, Label]] = []
    for piece, label in ordered:
        active = [(other, name) for other, name in active if other.start + other.extent > piece.start]
        for other, name in active:
            if _meet(other, piece):
                return name, label
        left -= len(active)
        if left < 0:
            return found
        active.append((piece, label))
    return None


def _meet(one: Piece, two: Piece) -> bool:
    if one.start >= two.start + two.extent or two.start >= one.start + one.extent:
        return False
    if not one.axes or not two.axes or one.axes[0][0] != two.axes[0][0]:
        return True
    (stride, ones), (_, twos) = one.axes[0], two.axes[0]
    inner, other = one.inside(one.start), two.inside(two.start)
    gap = two.start - one.start
    low, high = -((inner.extent - 1 - gap) // stride), (gap + other.extent - 1) // stride
    return any(
        _meet(one.inside(one.start + step * stride), other)
        for step in range(max(low, 1 - twos), min(high, ones - 1) + 1)
    )


def _maybe_shared(pieces: Iterable[tuple[Piece, Label]]) -> tuple[Label, Label] | None:
    """A quick look at all pieces together that misses nothing."""
    ordered = sorted(pieces, key=lambda item: item[0].start)
    group: list[tuple[Piece, Label]] = []
    end = 0
    for item in ordered:
        if group and item[0].start >= end:
            if (found := _shared_inside(group)) is not None:
                return found
            group = []
        end = max(end, item[0].start + item[0].extent) if group else item[0].start + item[0].extent
        group.append(item)
    return _shared_inside(group)


def _shared_inside(group: Sequence[tuple[Piece, Label]]) -> tuple[Label, Label] | None:
    """The same for pieces that lie among each other: those that step alike are compared modulo their stride."""
    if len(group) < 2:
        return None
    first, label = group[0]
    for piece, other in group[1:]:
        if not piece.axes or not first.axes or piece.axes[0][0] != first.axes[0][0]:
            return label, other
    stride = first.axes[0][0]
    once = [(piece.inside(piece.start % stride), name) for piece, name in group]
    reach = max(piece.start + piece.extent for piece, _ in once)
    again = [(piece._replace(start=piece.start + stride), name) for piece, name in once if piece.start + stride < reach]
    return _maybe_shared([*once, *again])
