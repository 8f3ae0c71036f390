"""Block ids of a request: checked once, then read page by page without ever being listed page by page."""

from __future__ import annotations

import operator
from typing import NamedTuple

import numpy as np

from kvrdma.errors import PlanError
from kvrdma.plan.request import MAX_POSITION, BlockSpan
from kvrdma.plan.tokens import Ints


class BlockIds(NamedTuple):
    """Block ids of a span and the index in the sequence of the first, read page by page."""

    ids: Ints
    first: int
    per_block: int
    side: str

    def at(self, index: Ints, lowest: int, highest: int, layer: str) -> Ints:
        """Look up pages by their index in the sequence, of which these are the lowest and the highest."""
        self.require(lowest, highest, layer)
        return self._pages(index - self.first * self.per_block if self.first else index)

    def along(self, index: range, layer: str) -> Ints:
        """Look up pages at equal distances; a view, where a block is a page."""
        self.require(index[0], index[-1], layer)
        skip = self.first * self.per_block
        if self.per_block == 1:
            return self.ids[index.start - skip : index[-1] - skip + 1 : index.step]
        return self._pages(np.arange(index.start - skip, index.stop - skip, index.step))

    def _pages(self, place: Ints) -> Ints:
        """Look up pages by how many of the span are before them."""
        if self.per_block == 1:
            return self.ids[place]
        pages: Ints = self.ids[place // self.per_block] * self.per_block + place % self.per_block
        return pages

    def require(self, lowest: int, highest: int, layer: str) -> None:
        """Refuse pages of the sequence that the blocks do not cover."""
        start, end = self.first * self.per_block, (self.first + len(self.ids)) * self.per_block
        if lowest < start or highest >= end:
            bad = lowest if lowest < start else max(lowest, end)
            raise PlanError(
                f"layer {layer}: needs {self.side} page {bad} of the sequence, but the blocks cover pages "
                f"{start} to {end - 1}"
            )


def block_ids(span: BlockSpan, per_block: int, side: str) -> BlockIds:
    """Read a span as integers.

    Raises:
        PlanError: the ids are no flat list of integers, or too large for any tensor.
    """
    try:
        given, first = np.asarray(span.ids), operator.index(span.first)
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(
            f"{side} block ids must be a flat list of integers and first an integer, got first {span.first!r}: {error}"
        ) from None
    flat = given.ndim == 1 and (not given.size or given.dtype.kind in "iu")
    if not flat or not 0 <= first <= MAX_POSITION:
        raise PlanError(
            f"{side} block ids must be a flat list of integers with 0 <= first <= {MAX_POSITION}, got shape "
            f"{given.shape}, dtype {given.dtype}, first {first}"
        )
    if given.dtype == np.uint64 and given.size and int(given.max()) > MAX_POSITION:
        raise PlanError(f"{side} block {int(given.max())} is outside every tensor: ids reach from 0 to {MAX_POSITION}")
    return BlockIds(given.astype(np.int64, copy=False), first, per_block, side)


def check_ids(blocks: BlockIds, pages: tuple[int, int], limit: int, layer: str) -> int:
    """Refuse blocks within the range that lie outside their tensor, or repeat, such as null blocks.

    Blocks outside the range (lookahead, null blocks behind a sliding window) are not looked at.

    Args:
        blocks: ids of one side.
        pages: pages of the sequence that are needed, ``[lo, hi)``.
        limit: blocks that the side's smallest tensor has.
        layer: for messages.

    Returns:
        The highest page of the blocks within the range, -1 if there are none.

    Raises:
        PlanError: names the block and the range, or the page.
    """
    per_block = blocks.per_block
    lo, hi = pages[0] // per_block - blocks.first, -(-pages[1] // per_block) - blocks.first
    used = blocks.ids[max(lo, 0) : max(hi, 0)]
    if not used.size:
        return -1
    ordered = used[used.argsort(kind="stable")]  # a plan calls few functions of NumPy: each is slow when it is cold
    lowest, highest = int(ordered[0]), int(ordered[-1])
    if lowest < 0 or highest >= limit:
        bad = lowest if lowest < 0 else highest
        raise PlanError(
            f"layer {layer}: {blocks.side} page {bad * per_block} is outside its tensor: block id {bad} must lie in "
            f"[0, {limit}), where a block is {per_block} pages"
        )
    again = ordered[1:] == ordered[:-1]
    if again.any():
        raise PlanError(
            f"layer {layer}: {blocks.side} page {int(ordered[1:][again][0]) * per_block} appears twice "
            "among those needed: two positions would share its bytes"
        )
    return (highest + 1) * per_block - 1
