"""Fills a whole page the cheapest way, in one step or, between transposed and token-major keys, in two.

A CPU page stores each head's keys as ``[D, N]``, other pages as ``[N, D]`` among other things, and no single
transpose turns one page into the other, or smaller CPU pages into a bigger one. Two do: one moves keys and values
to their places in the page, one turns each head's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from kvrdma.page_format import PageFormat, Part
from kvrdma.plan.cells import (
    LENGTH,
    LOCAL_OFFSET,
    LOCAL_PLANE,
    REMOTE_OFFSET,
    REMOTE_PAGE,
    REMOTE_PLANE,
    SOURCE,
    SourceShare,
    Table,
    direct_rows,
    merge_table,
)
from kvrdma.plan.landing import ReadCost, choose_landing
from kvrdma.plan.tokens import Ints, Runs
from kvrdma.reshape.spec import Reshape


@dataclass(frozen=True, slots=True)
class PageFill:
    """The rows of a full page and the reshapes that finish it, in order, as ``(plane, reshape)``."""

    rows: Table
    reshapes: tuple[tuple[int, Reshape], ...]

    def price(self, cost: ReadCost) -> float:
        """Nanoseconds for the page."""
        moved = sum(reshape.nbytes * reshape.count for _, reshape in self.reshapes)
        return len(self.rows) * cost.row_ns + moved * cost.byte_ns


def page_rows(fmt: PageFormat, shares: Sequence[SourceShare], runs: Runs) -> Table:
    """Direct rows of all sources, ordered by local place and merged."""
    return merge_table(np.concatenate([direct_rows(fmt, share, runs) for share in shares]))


def fill_page(fmt: PageFormat, shares: Sequence[SourceShare], runs: Runs, cost: ReadCost) -> PageFill:
    """Choose how to fill a page of which every token is read."""
    mine = any(_is_transposed(part) for part in fmt.parts)
    theirs = any(_is_transposed(part) for share in shares for part in share.format.parts)
    turn = {(True, False): _turn_last, (False, True): _turn_first, (True, True): _turn_parts}.get((mine, theirs))
    dense = all(fmt.is_dense(part.plane) for part in fmt.parts)
    two = turn(fmt, shares, runs, cost) if turn and dense else None
    if two is not None and mine != theirs and two.price(cost) < fmt.heads * fmt.tokens * cost.row_ns:
        return two  # one step takes at least a row per head and token
    one = _one_step(fmt, shares, runs, cost)
    return one if two is None or one.price(cost) <= two.price(cost) else two


def _one_step(fmt: PageFormat, shares: Sequence[SourceShare], runs: Runs, cost: ReadCost) -> PageFill:
    table = page_rows(fmt, shares, runs)
    planes = sorted({part.plane for part in fmt.parts})
    landings = [choose_landing(table[table[:, LOCAL_PLANE] == plane], fmt, plane, cost) for plane in planes]
    reshapes = [(plane, r) for plane, landing in zip(planes, landings, strict=True) for r in landing.reshapes]
    return PageFill(np.concatenate([landing.rows for landing in landings]), tuple(reshapes))


def _is_transposed(part: Part) -> bool:
    return part.elems > 1 and part.elem_stride != part.itemsize


def _token_major(fmt: PageFormat) -> PageFormat | None:
    """The same page with each head's keys turned within the bytes they occupy; None where they are not dense."""
    parts = []
    for part in fmt.parts:
        if not _is_transposed(part):
            parts.append(part)
            continue
        if part.elem_stride != fmt.tokens * part.itemsize or (fmt.tokens > 1 and part.token_stride != part.itemsize):
            return None
        parts.append(msgspec.structs.replace(part, token_stride=part.nbytes, elem_stride=part.itemsize))
    return msgspec.structs.replace(fmt, parts=tuple(parts))


def _turn_last(fmt: PageFormat, shares: Sequence[SourceShare], runs: Runs, cost: ReadCost) -> PageFill | None:
    """Fill the page with token-major keys, then turn the keys of each head."""
    plain = _token_major(fmt)
    if plain is None:
        return None
    fill = _one_step(plain, shares, runs, cost)
    turns = []
    for part in fmt.parts:
        if _is_transposed(part):
            count, stride = (fmt.heads, part.head_stride) if fmt.heads > 1 else (1, 0)
            turn = Reshape((fmt.tokens, part.elems), (1, 0), part.itemsize, part.offset, stride, count)
            turns.append((part.plane, turn))
    return PageFill(fill.rows, (*fill.reshapes, *turns))


def _turn_first(fmt: PageFormat, shares: Sequence[SourceShare], runs: Runs, cost: ReadCost) -> PageFill | None:
    """Read keys as they are, turn them where they landed, then go on as if they had been token-major."""
    plain = [_token_major(share.format) for share in shares]
    views = [replace(share, format=p) for share, p in zip(shares, plain, strict=True) if p is not None]
    if len(views) < len(shares):
        return None
    fill = _one_step(fmt, views, runs, cost)
    parts = {part.name: part for part in shares[0].format.parts if _is_transposed(part)}
    turns: list[tuple[int, Reshape]] = []
    for part in parts.values():
        landed = _landed_keys(fill.rows, shares, runs, part.name)
        if landed is None:
            return None
        plane, places = landed
        steps = np.unique(np.diff(places))
        if len(steps) > 1:
            return None
        stride = int(steps[0]) if len(steps) else 0
        shape = (part.elems, shares[0].format.tokens)
        turns.append((plane, Reshape(shape, (1, 0), part.itemsize, int(places[0]), stride, len(places))))
    return PageFill(fill.rows, (*turns, *fill.reshapes))


def _turn_parts(fmt: PageFormat, shares: Sequence[SourceShare], runs: Runs, cost: ReadCost) -> PageFill | None:
    """Between transposed keys: put whole smaller pages' keys one after the other, then weave each head's."""
    small = shares[0].format.tokens
    ratio = fmt.tokens // small
    whole = (runs.count == small) & (runs.remote_slot == 0) & (runs.slot % small == 0)
    local, plain = _token_major(fmt), [_token_major(share.format) for share in shares]
    views = [replace(share, format=p) for share, p in zip(shares, plain, strict=True) if p is not None]
    if ratio < 2 or not whole.all() or local is None or len(views) < len(shares):
        return None
    fill = _one_step(local, views, runs, cost)
    turns = []
    for part in fmt.parts:
        if _is_transposed(part):
            count, stride = (fmt.heads, part.head_stride) if fmt.heads > 1 else (1, 0)
            turn = Reshape((ratio, part.elems, small), (1, 0, 2), part.itemsize, part.offset, stride, count)
            turns.append((part.plane, turn))
    return PageFill(fill.rows, (*fill.reshapes, *turns))


def _landed_keys(rows: Table, shares: Sequence[SourceShare], runs: Runs, name: str) -> tuple[int, Ints] | None:
    """Plane and ascending offsets at which each head's keys of each remote page land whole; None if any does not."""
    places: list[Ints] = []
    planes: set[int] = set()
    for share in shares:
        part = next(part for part in share.format.parts if part.name == name)
        mine = rows[(rows[:, SOURCE] == share.index) & (rows[:, REMOTE_PLANE] == part.plane)]
        nbytes = part.nbytes * share.format.tokens
        for page in np.unique(runs.remote_page[runs.dcp_rank == share.dcp_rank]).tolist():
            here = mine[mine[:, REMOTE_PAGE] == page]
            starts = part.offset + (share.remote_head + np.arange(share.heads)) * part.head_stride
            begin, end = here[:, REMOTE_OFFSET], here[:, REMOTE_OFFSET] + here[:, LENGTH]
            inside = (begin <= starts[:, None]) & (starts[:, None] + nbytes <= end)
            if not inside.any(axis=1).all():
                return None
            row = inside.argmax(axis=1)
            places.append(here[row, LOCAL_OFFSET] + starts - begin[row])
            planes.update(here[row, LOCAL_PLANE].tolist())
    if len(planes) != 1:
        return None
    return planes.pop(), np.sort(np.concatenate(places))
