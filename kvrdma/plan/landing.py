"""Decides, for one plane of a page, between direct rows and bigger pieces finished by a reshape.

Pieces are what a page needs, joined where the *remote* side is contiguous. They land one after the other,
each source's together if possible so that consecutive remote blocks merge, and the page is then a
permutation of what it should be. Where that permutation is a transpose, ``Reshape`` says so; the shape is
derived from the permutation itself, so every pair of formats, block sizes and token shares goes through the
same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvrdma.page_format import PageFormat, Part
from kvrdma.plan.cells import LENGTH, LOCAL_OFFSET, REMOTE_OFFSET, REMOTE_PAGE, REMOTE_PLANE, SOURCE, Table
from kvrdma.plan.tokens import Ints
from kvrdma.reshape.spec import Reshape

_MAX_ATOMS = 1 << 22


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Prices that decide between many short rows and few long ones.

    Attributes:
        row_ns: posting one row, in nanoseconds.
        byte_ns: reshaping one byte in place (read and write), in nanoseconds.
    """

    row_ns: float = 600.0
    byte_ns: float = 0.02


@dataclass(frozen=True, slots=True)
class Unit:
    """Equal dense stretches of a page: the first at ``offset``, ``count`` of them ``stride`` bytes apart."""

    offset: int
    stride: int
    count: int
    nbytes: int

    def split(self, table: Table) -> tuple[Ints, Ints, Ints]:
        """Indices of the rows inside the unit's stretches, their stretch and their offset in it."""
        relative = table[:, LOCAL_OFFSET] - self.offset
        step = self.stride if self.count > 1 else max(self.nbytes, 1)
        stretch = relative // step
        inner = relative - stretch * step
        fits = (relative >= 0) & (stretch < self.count) & (inner + table[:, LENGTH] <= self.nbytes)
        index = np.flatnonzero(fits)
        return index, stretch[index], inner[index]


@dataclass(frozen=True, slots=True)
class Landing:
    """The rows of one plane of a full page, and the reshapes that finish it."""

    rows: Table
    reshapes: tuple[Reshape, ...]


def choose_landing(table: Table, fmt: PageFormat, plane: int, cost: ReadCost) -> Landing:
    """Pick the cheapest exact way to fill one plane of a page.

    Args:
        table: merged direct rows of the plane; together they fill the page.
        fmt: format of the local page.
        plane: which plane.
        cost: prices.
    """
    if not fmt.is_dense(plane):
        return Landing(table, ())
    parts = [part for part in fmt.parts if part.plane == plane]
    whole = [_land(table, unit, parts[0].itemsize, cost) for unit in _units(fmt, parts)]
    best_whole = min((landing for landing in whole if landing), key=lambda x: len(x.rows), default=None)
    by_part, saved = Landing(table, ()), 0.0
    for part in parts if len(parts) > 1 else ():
        landings = [_land(by_part.rows, unit, part.itemsize, cost) for unit in _units(fmt, [part])]
        better = min((landing for landing in landings if landing), key=lambda x: len(x.rows), default=None)
        if better is not None:
            by_part = Landing(better.rows, by_part.reshapes + better.reshapes)
            saved += sum(r.nbytes * r.count for r in better.reshapes) * cost.byte_ns
    if best_whole is None:
        return by_part
    moved = sum(r.nbytes * r.count for r in best_whole.reshapes) * cost.byte_ns
    price_whole = len(best_whole.rows) * cost.row_ns + moved
    return best_whole if price_whole <= len(by_part.rows) * cost.row_ns + saved else by_part


def _units(fmt: PageFormat, parts: list[Part]) -> Iterator[Unit]:
    """The dense stretches that hold exactly these parts: all heads at once, or head by head."""
    start = min(part.offset for part in parts)
    per_head = sum(part.nbytes for part in parts) * fmt.tokens
    for heads in {fmt.heads, 1}:
        end = max(
            part.offset
            + (heads - 1) * part.head_stride
            + (fmt.tokens - 1) * part.token_stride
            + (part.elems - 1) * part.elem_stride
            + part.itemsize
            for part in parts
        )
        if end - start != heads * per_head:
            continue
        stride, count = (0, 1) if heads == fmt.heads else (parts[0].head_stride, fmt.heads)
        if all(part.head_stride == stride for part in parts) or count == 1:
            yield Unit(start, stride, count, heads * per_head)


def _land(table: Table, unit: Unit, itemsize: int, cost: ReadCost) -> Landing | None:
    """Replace the rows of a unit by pieces and a reshape, if that is possible and cheaper."""
    index, stretch, inner = unit.split(table)
    rows = table[index]
    if int(rows[:, LENGTH].sum()) != unit.nbytes * unit.count:
        return None
    order = np.lexsort((rows[:, REMOTE_OFFSET], rows[:, REMOTE_PAGE], rows[:, REMOTE_PLANE], rows[:, SOURCE], stretch))
    rows, stretch, inner = rows[order], stretch[order], inner[order]
    pieces, which, first = _pieces(rows, stretch, inner)
    if len(pieces) * cost.row_ns + unit.nbytes * unit.count * cost.byte_ns >= len(rows) * cost.row_ns:
        return None
    home = stretch[np.searchsorted(which, np.arange(len(pieces)))]
    for keys in ((first, pieces[:, REMOTE_PAGE], pieces[:, SOURCE]), (first,)):
        place = _stack(pieces[:, LENGTH], np.lexsort((*keys, home))) - home * unit.nbytes
        landing = place[which] + rows[:, REMOTE_OFFSET] - pieces[which, REMOTE_OFFSET]
        found = _transpose(stretch, inner, landing, (rows[:, LENGTH], unit))
        if found is not None:
            pieces[:, LOCAL_OFFSET] = unit.offset + home * unit.stride + place
            kept = np.delete(table, index, axis=0)
            return Landing(np.concatenate([kept, pieces]), (_reshape(*found, itemsize, unit),))
    return None


def _pieces(rows: Table, stretch: Ints, inner: Ints) -> tuple[Table, Ints, Ints]:
    """Join rows (ordered by remote place) where the remote side is contiguous.

    Returns:
        The pieces, the piece of each row, and the first offset in its stretch that each piece is for.
    """
    new = np.ones(len(rows), bool)
    new[1:] = stretch[1:] != stretch[:-1]
    for column in (SOURCE, REMOTE_PLANE, REMOTE_PAGE):
        new[1:] |= rows[1:, column] != rows[:-1, column]
    new[1:] |= rows[1:, REMOTE_OFFSET] != rows[:-1, REMOTE_OFFSET] + rows[:-1, LENGTH]
    starts = np.flatnonzero(new)
    pieces = rows[starts]
    pieces[:, LENGTH] = np.add.reduceat(rows[:, LENGTH], starts)
    return pieces, np.cumsum(new) - 1, np.minimum.reduceat(inner, starts)


def _stack(length: Ints, order: Ints) -> Ints:
    """Where each piece lands when they are laid one after the other in the given order."""
    place = np.empty(len(length), np.int64)
    place[order] = np.cumsum(length[order]) - length[order]
    return place


def _transpose(
    stretch: Ints, inner: Ints, landing: Ints, sizes: tuple[Ints, Unit]
) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Shape, axes and bytes per element of the transpose that every stretch needs; None if there is none."""
    length, unit = sizes
    grain = math.gcd(unit.nbytes, *np.unique(np.concatenate([inner, landing, length])).tolist())
    atoms = unit.nbytes // grain
    if atoms * unit.count > _MAX_ATOMS:
        return None
    repeats = length // grain
    offset = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    source = np.empty((unit.count, atoms), np.int64)
    where = (np.repeat(stretch, repeats), np.repeat(inner // grain, repeats) + offset)
    source[where] = np.repeat(landing // grain, repeats) + offset
    if (source != source[0]).any():
        return None
    found = factorise(source[0])
    return None if found is None or len(found[1]) < 2 else (*found, grain)


def factorise(source: Ints) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Find the transpose that a permutation is.

    Args:
        source: ``source[i]`` is the place in which the element belonging at ``i`` landed.

    Returns:
        ``(shape, axes)`` such that ``landed.reshape(shape).transpose(axes).ravel()`` puts every element in
        place, with as few axes as possible; None if the permutation is no transpose.
    """
    dims: list[tuple[int, int]] = []
    block = 1
    while block < len(source):
        if len(source) % block:
            return None
        heads = source[::block]
        step = int(heads[1])
        wrong = np.flatnonzero(heads != np.arange(len(heads)) * step)
        count = int(wrong[0]) if len(wrong) else len(heads)
        if count < 2 or step < 1:
            return None
        dims.insert(0, (count, step))
        block *= count
    rebuilt = np.zeros(1, np.int64)
    for count, step in dims:
        rebuilt = (rebuilt[:, None] + np.arange(count) * step).ravel()
    if len(rebuilt) != len(source) or (rebuilt != source).any():
        return None
    landed = sorted(dims, key=lambda dim: -dim[1])
    inside = [math.prod(count for count, _ in landed[i + 1 :]) for i in range(len(landed))]
    if inside != [step for _, step in landed]:
        return None
    return tuple(count for count, _ in landed), tuple(landed.index(dim) for dim in dims)


def _reshape(shape: tuple[int, ...], axes: tuple[int, ...], grain: int, itemsize: int, unit: Unit) -> Reshape:
    """Express a transpose of grains in elements, with the contiguous run as last axis."""
    item = itemsize if grain % itemsize == 0 else grain
    width = grain // item
    if axes[-1] == len(axes) - 1:
        shape = (*shape[:-1], shape[-1] * width)
    elif width > 1:
        shape, axes = (*shape, width), (*axes, len(axes))
    stride = unit.stride if unit.count > 1 else 0
    return Reshape(shape, axes, item, unit.offset, stride, unit.count)
