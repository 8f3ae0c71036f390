"""Rows of equal pages: written by broadcast, joined page by page before, and known to be whole without a look at them.

A request has thousands of rows and a pull waits for its plan. What decides about them is the ids of its pages: which
of them follow each other on both sides, and how far the highest reaches. Rows are looked at one by one
(``join_rows``, ``check_bounds``) only where the ids leave it open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvrdma.plan.prepare import LayerGroup, PlaneBases, Stream
from kvrdma.plan.tokens import Ints
from kvrdma.rows import LENGTH, LOCAL, OFFSET, REGION, Rows


class Piece(NamedTuple):
    """Rows that one stream of a template reads for equal pages of all layers of a group.

    Attributes:
        rows: ``(layers * pages * rows of the template, 4)``, by local address within each layer.
        rows_before: rows before pages that follow each other on both sides were joined.
        plane: where the pages lie here.
        pages: local page ids, ascending.
        span: bytes from a layer's base to the first and behind the last byte that is written.
        joined: no two rows of a layer are adjacent on both sides.
        inside: no row leaves its regions.
    """

    rows: Rows
    rows_before: int
    plane: PlaneBases
    pages: Ints
    span: tuple[int, int]
    joined: bool
    inside: bool


def fill(group: LayerGroup, stream: Stream, pages: Ints, theirs: Ints, highest: int) -> Piece:
    """Broadcast one stream over layers, pages and rows of the template.

    Args:
        group: the layers.
        stream: rows of one page.
        pages: ``(P,)`` local page ids, ascending.
        theirs: ``(P, R)`` remote page ids, one per row of the stream.
        highest: no remote page is above it.
    """
    local, remote = group.local[stream.local_plane], group.remote[stream.source, stream.remote_plane]
    span = int(pages[0]) * local.page_stride + stream.first, int(pages[-1]) * local.page_stride + stream.reach
    reach = span[1], highest * remote.page_stride + stream.remote_reach
    inside = min(local.page_stride, remote.page_stride) > 0 and reach[0] <= local.room and reach[1] <= remote.room
    here, there, length = pages, theirs, stream.length
    joined = not (stream.touch and _ascends(theirs[:, :-1], theirs[:, 1:]))
    if stream.reach > stream.first + local.page_stride:  # pages lie among one another: any two may meet
        joined = False
    elif len(pages) > 1 and stream.reach >= stream.first + local.page_stride:
        follows = pages[1:] == pages[:-1] + 1
        if len(length) > 1 or not stream.reach - stream.first == local.page_stride == remote.page_stride:
            joined &= not follows.any()
        else:
            follows &= theirs[1:, 0] == theirs[:-1, 0] + 1
            if follows.any():
                starts = np.flatnonzero(np.concatenate(([True], ~follows)))
                here, there = pages[starts], theirs[starts]
                length = np.diff(starts, append=len(pages))[:, None] * length
    rows = np.empty((len(group.names), *there.shape, 4), np.int64)  # no address or offset is as high as its sign
    mine = here[:, None] * local.page_stride + stream.local_offset
    other = there * remote.page_stride + stream.remote_offset
    np.add(local.base[:, None, None], mine, out=rows[..., LOCAL])
    rows[..., REGION] = remote.region[:, None, None]
    np.add(remote.base[:, None, None], other, out=rows[..., OFFSET])
    rows[..., LENGTH] = length
    return Piece(
        rows.reshape(-1, 4).view(np.uint64), len(group.names) * theirs.size, local, pages, span, joined, inside
    )


def are_joined(pieces: Sequence[Piece]) -> bool:
    """Whether certainly no two rows of the pieces are adjacent on both sides; they may lie in any order then."""
    if not all(piece.joined for piece in pieces):
        return False
    if len(pieces) == 1:
        return pieces[0].plane.gap > pieces[0].span[1] - pieces[0].span[0]
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
    starts, ends = [], []
    for first, *more in planes.values():
        starts.append(first.plane.base + min(piece.span[0] for piece in (first, *more)))
        ends.append(first.plane.base + max(piece.span[1] for piece in (first, *more)))
    start, end = np.concatenate(starts), np.concatenate(ends)
    order = start.argsort()
    return bool((start[order[1:]] > end[order[:-1]]).all())


def _ascends(page: Ints, following: Ints) -> bool:
    """Whether any page is followed by itself or by the next one."""
    step = following - page
    return bool(((step >= 0) & (step <= 1)).any())


def _meet(one: Ints, other: Ints) -> bool:
    """Whether a page of one is, or is next to, one of the other; both ascending."""
    few, many = (one, other) if len(one) < len(other) else (other, one)
    after = np.searchsorted(many, few)
    above, below = many[np.minimum(after, len(many) - 1)], many[np.maximum(after - 1, 0)]
    return bool(((abs(above - few) <= 1) | (abs(below - few) <= 1)).any())
