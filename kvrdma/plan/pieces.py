"""Rows of equal pages: not written out, joined page by page, and known to be whole without a look at them.

A request has thousands of rows and a pull waits for its plan. What decides about them is the ids of its pages: which
of them follow each other on both sides, and how far the highest reaches. Rows are looked at one by one
(``join_rows``, ``check_bounds``) only where the ids leave it open.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvrdma.plan.prepare import LayerGroup, PlaneBases, Stream
from kvrdma.plan.tokens import Ints
from kvrdma.rows import LENGTH, LOCAL, OFFSET, REGION, Grid, RowGrids, as_rows


class Piece(msgspec.Struct):
    """Rows that one stream of a template reads for equal pages of all layers of a group.

    Attributes:
        grid: each layer's start, and what is read of the pages, by local address within a layer.
        rows_before: rows before pages that follow each other on both sides were joined.
        nbytes: of all rows.
        plane: where the pages lie here.
        pages: local page ids, ascending.
        span: bytes from a layer's base to the first and behind the last byte that is written.
        joined: no two rows of a layer are adjacent on both sides.
        inside: no row leaves its regions.
    """

    grid: Grid
    rows_before: int
    nbytes: int
    plane: PlaneBases
    pages: Ints | list[int]
    span: tuple[int, int]
    joined: bool
    inside: bool


def fill(group: LayerGroup, stream: Stream, pages: Ints, theirs: Ints, highest: int) -> Piece:
    """Broadcast one stream over pages and rows of the template.

    Args:
        group: the layers.
        stream: rows of one page.
        pages: ``(P,)`` local page ids, ascending.
        theirs: ``(P, R)`` remote page ids, one per row of the stream.
        highest: no remote page is above it.
    """
    here, there, counts = pages, theirs, np.ones(1, np.int64)
    joined = not (stream.woven or (stream.touch and _ascends(theirs[:, :-1], theirs[:, 1:])))
    if len(pages) > 1 and stream.full:
        follows = pages[1:] == pages[:-1] + 1
        if not stream.whole:
            joined &= not follows.any()
        else:
            follows &= theirs[1:, 0] == theirs[:-1, 0] + 1
            if follows.any():
                starts = np.flatnonzero(np.concatenate(([True], ~follows)))
                here, there = pages[starts], theirs[starts]
                counts = np.diff(starts, append=len(pages))
    numbers = np.zeros((*there.shape, 4), np.uint64)
    numbers[..., LOCAL], numbers[..., OFFSET], numbers[..., LENGTH] = here[:, None], there, counts[:, None]
    grid = Grid(stream.bases, (numbers * stream.scale + stream.cells).reshape(-1, 4))
    return piece_of(group, stream, grid, pages, highest, joined=joined)


def piece_of(
    group: LayerGroup, stream: Stream, grid: Grid, pages: Ints | list[int], highest: int, *, joined: bool
) -> Piece:
    """Put a piece together; see ``fill`` and ``Piece``."""
    local, remote, times = stream.here, stream.there, len(group.names) * len(pages)
    span = int(pages[0]) * local.page_stride + stream.first, int(pages[-1]) * local.page_stride + stream.reach
    reach = highest * remote.page_stride + stream.remote_reach
    inside = min(local.page_stride, remote.page_stride) > 0 and span[1] <= local.room and reach <= remote.room
    return Piece(grid, times * len(stream.cells), times * stream.nbytes, local, pages, span, joined, inside)


def are_joined(pieces: Sequence[Piece]) -> bool:
    """Whether certainly no two rows of the pieces are adjacent on both sides; they may lie in any order then."""
    if len(pieces) < 2:
        return not pieces or (pieces[0].joined and _layers_apart(pieces[0]))
    if not all(piece.joined for piece in pieces):
        return False
    planes: dict[int, list[Piece]] = {}
    for piece in pieces:
        planes.setdefault(id(piece.plane), []).append(piece)
    for members in planes.values():
        stride = members[0].plane.page_stride
        lowest = min(piece.span[0] - int(piece.pages[0]) * stride for piece in members)
        if max(piece.span[1] - int(piece.pages[-1]) * stride for piece in members) > lowest + stride:
            return False
        if any(_meet(one.pages, other.pages) for i, one in enumerate(members) for other in members[:i]):
            return False
    spans = [piece.span for piece in pieces]
    if len(planes) == 1 and pieces[0].plane.gap > max(end for _, end in spans) - min(start for start, _ in spans):
        return True
    starts, ends = [], []
    for first, *more in planes.values():
        starts.append(first.plane.base + min(piece.span[0] for piece in (first, *more)))
        ends.append(first.plane.base + max(piece.span[1] for piece in (first, *more)))
    start, end = np.concatenate(starts), np.concatenate(ends)
    order = start.argsort()
    return bool((start[order[1:]] > end[order[:-1]]).all())


def _layers_apart(piece: Piece) -> bool:
    """Whether the last row of one layer and the first of the next, as they lie here, are not adjacent on both sides."""
    between = piece.plane.gap - (piece.span[1] - piece.span[0])
    if between:
        return between > 0
    bases = as_rows(piece.grid.bases)
    layer = RowGrids((piece.grid._replace(bases=bases[:1]),), as_they_are=True).expand()
    first, last = layer[layer[:, LOCAL].argmin()], layer[layer[:, LOCAL].argmax()]
    apart = (int(last[OFFSET]) + int(last[LENGTH]) - int(first[OFFSET])) % (1 << 64)
    region, start = bases[:, REGION], bases[:, OFFSET]
    return not ((region[1:] == region[:-1]) & (start[1:] == start[:-1] + np.uint64(apart))).any()


def _ascends(page: Ints, following: Ints) -> bool:
    """Whether any page is followed by itself or by the next one."""
    step = following - page
    return bool(((step >= 0) & (step <= 1)).any())


def _meet(one: Ints | list[int], other: Ints | list[int]) -> bool:
    """Whether a page of one is, or is next to, one of the other; both ascending."""
    few, many = (one, other) if len(one) < len(other) else (other, one)
    if isinstance(few, list) and isinstance(many, list):
        return not {page + step for page in few for step in (-1, 0, 1)}.isdisjoint(many)
    few, many = np.asarray(few), np.asarray(many)
    after = np.searchsorted(many, few)
    above, below = many[np.minimum(after, len(many) - 1)], many[np.maximum(after - 1, 0)]
    return bool(((abs(above - few) <= 1) | (abs(below - few) <= 1)).any())
