"""Turns pairs of page formats and token runs into direct rows: each byte read straight to its final place.

Tables here are ``(N, 7)`` int64 arrays of rows relative to page starts, with the columns named below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvrdma.errors import IncompatibleError
from kvrdma.page_format import PageFormat, Part
from kvrdma.plan.tokens import Ints, Runs

Table: TypeAlias = Ints

SOURCE, LOCAL_PLANE, REMOTE_PLANE, REMOTE_PAGE, LOCAL_OFFSET, REMOTE_OFFSET, LENGTH = range(7)

Axis: TypeAlias = tuple[int, int, int]
"""Count, local stride and remote stride of one axis of a copy."""

MAX_PAGE_ROWS = 1 << 22
"""Rows of one page: a few hundred megabytes while a template is made."""


@dataclass(frozen=True, slots=True)
class SourceShare:
    """What one source contributes to the pages of a group of equal layers.

    ``heads`` counts heads taken; ``local_head`` and ``remote_head`` are their first index in each page.
    """

    index: int
    dcp_rank: int
    format: PageFormat
    heads: int
    local_head: int
    remote_head: int


def strided_rows(axes: Sequence[Axis], nbytes: int) -> tuple[Ints, Ints, int]:
    """Split a strided copy into the fewest rows that are contiguous on both sides.

    Args:
        axes: the axes of the copy, in any order.
        nbytes: contiguous bytes at each index.

    Returns:
        Local offsets ascending, remote offsets, and the bytes of each row.
    """
    outer = [axis for axis in axes if axis[0] > 1]
    while dense := [axis for axis in outer if axis[1] == axis[2] == nbytes]:
        outer.remove(dense[0])
        nbytes *= dense[0][0]
    if math.prod(count for count, _, _ in outer) > MAX_PAGE_ROWS:
        sizes = [count for count, _, _ in outer]
        raise IncompatibleError(
            f"a page would take {' x '.join(map(str, sizes))} rows of {nbytes} bytes, more than {MAX_PAGE_ROWS}: use "
            "the same page format on both engines, or smaller blocks"
        )
    local = remote = np.zeros(1, np.int64)
    for count, local_stride, remote_stride in sorted(outer, key=lambda axis: -axis[1]):
        steps = np.arange(count)
        local = (local[:, None] + steps * local_stride).ravel()
        remote = (remote[:, None] + steps * remote_stride).ravel()
    return local, remote, nbytes


def _content(mine: Part, theirs: Part) -> tuple[list[Axis], int]:
    """The axis of elements, where either side does not keep them together, and the bytes of one step."""
    transposed = [part for part in (mine, theirs) if part.elem_stride != part.itemsize and part.elems > 1]
    if not transposed:
        return [], mine.nbytes
    item = transposed[0].itemsize
    steps = [part.elem_stride if part in transposed else item for part in (mine, theirs)]
    return [(mine.nbytes // item, steps[0], steps[1])], item


def _steps(part: Part) -> tuple[int, ...]:
    return part.plane, part.head_stride, part.token_stride, part.elem_stride, part.elems, part.itemsize


def _part_pairs(local: PageFormat, remote: PageFormat) -> Iterator[tuple[Part, Part, list[Axis]]]:
    """Parts of equal name, with an axis over both where keys and values are stored alike."""
    theirs = {part.name: part for part in remote.parts}
    pairs = [(part, theirs[part.name]) for part in local.parts]
    if len(pairs) == 2 and all(_steps(pairs[0][i]) == _steps(pairs[1][i]) for i in (0, 1)):
        axis = (2, pairs[1][0].offset - pairs[0][0].offset, pairs[1][1].offset - pairs[0][1].offset)
        yield *pairs[0], [axis]
        return
    for mine, other in pairs:
        yield mine, other, []


def direct_rows(local: PageFormat, share: SourceShare, runs: Runs) -> Table:
    """List the rows that read one source's part of a page straight into place.

    Args:
        local: format of the local page.
        share: which heads come from this source, and its format.
        runs: token runs of the page; those of other dcp ranks are ignored.
    """
    mine = np.flatnonzero(runs.dcp_rank == share.dcp_rank)
    tables = [np.empty((0, 7), np.int64)]
    for count in np.unique(runs.count[mine]).tolist():
        chosen = mine[runs.count[mine] == count]
        tables.extend(_run_rows(share, pair, (runs, chosen, count)) for pair in _part_pairs(local, share.format))
    return np.concatenate(tables)


def _run_rows(
    share: SourceShare,
    pair: tuple[Part, Part, list[Axis]],
    chosen: tuple[Runs, Ints, int],
) -> Table:
    mine, theirs, axes = pair
    runs, index, count = chosen
    content, nbytes = _content(mine, theirs)
    heads = (share.heads, mine.head_stride, theirs.head_stride)
    tokens = (count, mine.token_stride, theirs.token_stride)
    local_rows, remote_rows, nbytes = strided_rows([*axes, heads, tokens, *content], nbytes)
    slots = runs.slot[index] * mine.token_stride + mine.offset + share.local_head * mine.head_stride
    places = runs.remote_slot[index] * theirs.token_stride + theirs.offset
    places = places + share.remote_head * theirs.head_stride
    table = np.empty((len(index), len(local_rows), 7), np.int64)
    table[..., SOURCE] = share.index
    table[..., LOCAL_PLANE] = mine.plane
    table[..., REMOTE_PLANE] = theirs.plane
    table[..., REMOTE_PAGE] = runs.remote_page[index][:, None]
    table[..., LOCAL_OFFSET] = slots[:, None] + local_rows
    table[..., REMOTE_OFFSET] = places[:, None] + remote_rows
    table[..., LENGTH] = nbytes
    return table.reshape(-1, 7)


def merge_table(table: Table) -> Table:
    """Order rows by local place and join those adjacent on both sides."""
    table = table[np.lexsort((table[:, LOCAL_OFFSET], table[:, LOCAL_PLANE]))]
    same = (table[1:, :LOCAL_OFFSET] == table[:-1, :LOCAL_OFFSET]).all(axis=1)
    for column in (LOCAL_OFFSET, REMOTE_OFFSET):
        same &= table[1:, column] == table[:-1, column] + table[:-1, LENGTH]
    if not same.any():
        return table
    starts = np.flatnonzero(np.concatenate(([True], ~same)))
    merged = table[starts]
    merged[:, LENGTH] = np.add.reduceat(table[:, LENGTH], starts)
    return merged
