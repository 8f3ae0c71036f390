"""Turns block ids and a token range into rows to read and reshapes to run.

A ``Planner`` is made once per (local rank, remote engine) at the handshake, which is where every pair it
could not serve is refused. ``plan`` is then pure arithmetic on the request's block ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from kvrdma.errors import PlanError
from kvrdma.layout import KVLayout, Storage
from kvrdma.plan.finish import check_bounds, join_rows
from kvrdma.plan.ids import BlockIds, block_ids, check_ids
from kvrdma.plan.landing import ReadCost
from kvrdma.plan.pieces import Piece, are_joined, fill
from kvrdma.plan.prepare import LayerGroup, PageTemplate, prepare
from kvrdma.plan.request import BlockSpan, TokenRange, local_pages, range_of, remote_pages
from kvrdma.plan.short import short_pieces
from kvrdma.plan.tokens import Ints, tokens_before
from kvrdma.reshape.spec import Reshape
from kvrdma.rows import Batch, Grid, RowGrids, Rows, as_rows
from kvrdma.topology import RankId, Source

MAX_ROWS = 1 << 25
"""Rows of one request; more would take over a gigabyte to describe."""


class SourceReads(msgspec.Struct, frozen=True):
    """What to read from one remote rank. ``batch`` may be empty: the rank must still be told when done.

    Attributes:
        source: the remote rank and the heads taken from it.
        batch: the rows, in no particular order, as a transport takes them.
        rows_before: rows before adjacent ones were joined.
        nbytes: bytes to read.
    """

    source: Source
    batch: Batch
    rows_before: int
    nbytes: int

    @property
    def rows(self) -> Rows:
        """The rows written out: ``(N, 4)`` uint64: local address, index in the rank's regions, offset, bytes."""
        return as_rows(self.batch)


@dataclass(frozen=True, slots=True)
class PageReshape:
    """One reshape and the pages it finishes, to run when the reads of *all* sources are done.

    Attributes:
        reshape: the transpose of each page.
        layers: names of the layers.
        plane: 1 for values apart from the keys: of a (keys, values) pair, or behind a leading axis of 2.
        pages: int64 indices along the tensor's block axis.
    """

    reshape: Reshape
    layers: tuple[str, ...]
    plane: int
    pages: Ints


class ReadPlan(msgspec.Struct, frozen=True):
    """Everything one rank does to fetch a request: what to read from each source, then reshapes in this order."""

    sources: tuple[SourceReads, ...]
    reshapes: tuple[PageReshape, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to read from all sources."""
        return sum(source.nbytes for source in self.sources)


class _Pages(NamedTuple):
    """Equal pages of a layer group: template, local page ids, and remote page index at the period's start.

    ``ends`` are the lowest and the highest of the latter.
    """

    template: PageTemplate
    local: Ints
    remote_start: Ints
    ends: tuple[int, int]


class Planner:
    """Plans any number of requests for one local rank against one remote engine.

    Safe to call from one thread at a time: templates of partial pages are cached, within a fixed budget of rows.
    Layers with different numbers of kv heads (a GQA draft beside MLA) need the sources of each: pass the union of
    ``select_sources`` over their shapes, and each layer takes every head from the first source that holds it.
    """

    def __init__(
        self,
        local: KVLayout,
        remote: Mapping[RankId, KVLayout],
        sources: Sequence[Source],
        cost: ReadCost | None = None,
    ) -> None:
        """Check the pair and prepare it; see ``prepare`` for the errors."""
        self.sources = tuple(sources)
        self._local_regions: tuple[Storage, ...] = local.regions
        self._remote_regions = [remote[source.rank].regions if source.rank in remote else () for source in sources]
        self._groups = prepare(local, remote, sources, cost or ReadCost())
        for group in self._groups:
            group.warm()

    def plan(
        self,
        local: Sequence[BlockSpan],
        remote: Sequence[BlockSpan],
        tokens: TokenRange | Sequence[TokenRange],
    ) -> ReadPlan:
        """Plan one request.

        Args:
            local: this rank's blocks, one span per KV group.
            remote: the remote engine's blocks (the same ids on all its ranks), one span per KV group.
            tokens: positions to read, for all groups or one range per group. Groups of state ignore it: their
                blocks are paired one to one.

        Raises:
            PlanError: a block that the range needs is missing, repeated or outside its tensor, the number of
                spans is wrong, or a row would leave its region.
        """
        pieces: list[list[Piece]] = [[] for _ in self.sources]
        reshapes: dict[tuple[tuple[str, ...], tuple[tuple[int, Reshape], ...]], list[Ints]] = {}
        planned = 0
        for group in self._groups:
            short = short_pieces(group, (local, remote), tokens)
            if short is not None:
                for source, piece in short:
                    planned += piece.rows_before
                    if planned > MAX_ROWS:
                        raise _too_many(group, piece.rows_before, len(piece.pages))
                    pieces[source].append(piece)
                continue
            wanted, here, there, top = _open_group(group, (local, remote), tokens)
            for pages in _pages(group, here, wanted):
                each = sum(len(stream.cells) for stream in pages.template.streams)
                rows = len(group.names) * len(pages.local) * each
                planned += rows
                if planned > MAX_ROWS:  # before memory is spent on them
                    raise _too_many(group, rows, len(pages.local))
                for stream in pages.template.streams:
                    (lowest, highest), (first, last) = pages.ends, stream.remote_pages
                    index = pages.remote_start[:, None]
                    index = index + stream.remote_page if last or len(stream.remote_page) > 1 else index
                    theirs = there.at(index, lowest + first, highest + last, group.names[0])
                    pieces[stream.source].append(fill(group, stream, pages.local, theirs, top))
                if pages.template.reshapes:
                    reshapes.setdefault((group.names, pages.template.reshapes), []).append(pages.local)
        reads = tuple(map(self._finish, self.sources, self._remote_regions, pieces))
        if not reshapes:
            return ReadPlan(reads, ())
        finished = (
            PageReshape(reshape, names, plane, np.concatenate(pages))
            for (names, steps), pages in reshapes.items()
            for plane, reshape in steps
        )
        return ReadPlan(reads, tuple(finished))

    def _finish(self, source: Source, regions: Sequence[Storage], pieces: list[Piece]) -> SourceReads:
        grids: list[Grid] = []
        rows_before = nbytes = 0
        inside = True
        for piece in pieces:  # in few steps: a pull waits for them
            grids.append(piece.grid)
            rows_before += piece.rows_before
            nbytes += piece.nbytes
            inside = inside and piece.inside
        batch: Batch = RowGrids(grids, as_they_are=True)
        if not are_joined(pieces):
            batch = join_rows(as_rows(batch), self._local_regions)
        if not inside:
            check_bounds(as_rows(batch), self._local_regions, regions)
        return SourceReads(source, batch, rows_before, nbytes)


def _open_group(
    group: LayerGroup,
    blocks: tuple[Sequence[BlockSpan], Sequence[BlockSpan]],
    tokens: TokenRange | Sequence[TokenRange],
) -> tuple[TokenRange, BlockIds, BlockIds, int]:
    """The token range of a group of layers, and the pages of both sides, checked as far as ids alone allow.

    The number is the highest remote page.
    """
    counts = [len(spans) for spans in blocks]
    if group.group >= min(counts):
        raise PlanError(
            f"layer {group.names[0]} uses KV group {group.group}: got {counts[0]} local and {counts[1]} remote "
            "block spans"
        )
    local, remote = (spans[group.group] for spans in blocks)
    if group.format.kind == "state":
        local, remote = BlockSpan(local.ids), BlockSpan(remote.ids)
    here, there = (
        block_ids(local, group.pages_per_block, "local"),
        block_ids(remote, group.remote_pages_per_block, "remote"),
    )
    wanted, highest = range_of(group, tokens, (len(here.ids), len(there.ids))), -1
    if wanted.start < wanted.end:
        check_ids(here, local_pages(group, wanted), group.blocks[0], group.names[0])
        highest = check_ids(there, remote_pages(group, wanted), group.blocks[1], group.names[0])
    return wanted, here, there, highest


def _too_many(group: LayerGroup, rows: int, pages: int) -> PlanError:
    return PlanError(
        f"the request takes over {MAX_ROWS} rows ({rows} for {pages} pages of {group.names[0]}): use "
        "equal block sizes and page formats, or pull fewer tokens at a time"
    )


def _pages(group: LayerGroup, here: BlockIds, wanted: TokenRange) -> Iterator[_Pages]:
    """Group the needed local pages by template: full ones by their place in the period, then clipped ones."""
    lo, hi = tokens_before(group.tokens, wanted.start), tokens_before(group.tokens, wanted.end)
    if hi <= lo:
        return
    size, period = group.format.tokens, len(group.map)
    here.require(lo // size, (hi - 1) // size, group.names[0])  # before memory is spent on that many pages
    full_lo, full_hi = -(-lo // size), hi // size
    jobs = [(range(page, full_hi, period), 0, size) for page in range(full_lo, min(full_lo + period, full_hi))]
    jobs += [
        (range(page, page + 1), max(lo - page * size, 0), min(hi - page * size, size))
        for page in sorted({lo // size, (hi - 1) // size})
        if not full_lo <= page < full_hi
    ]
    for index, start, end in jobs:
        ids = here.along(index, group.names[0])
        order = ids.argsort(kind="stable")
        lowest, step = index.start // period, group.map.remote_pages
        yield _Pages(
            template=group.template(index.start % period, start, end),
            local=ids[order],
            remote_start=order if (lowest, step) == (0, 1) else (order + lowest) * step,
            ends=(lowest * step, (lowest + len(index) - 1) * step),
        )


@lru_cache(maxsize=64)
def _planner(local: KVLayout, remote: tuple[tuple[RankId, KVLayout], ...], sources: tuple[Source, ...]) -> Planner:
    return Planner(local, dict(remote), sources)


def plan_reads(
    local: KVLayout,
    remote: Mapping[RankId, KVLayout],
    topology: Sequence[Source],
    local_blocks: Sequence[BlockSpan],
    remote_blocks: Sequence[BlockSpan],
    tokens: TokenRange | Sequence[TokenRange],
) -> ReadPlan:  # the six are the two engines, who reads whom, and the request
    """Plan one request, preparing the pair on first use; see ``Planner`` for arguments and errors.

    Args:
        local: layout of this rank.
        remote: layouts of the source ranks.
        topology: what ``select_sources`` chose for this rank.
        local_blocks: one span per KV group.
        remote_blocks: one span per KV group.
        tokens: positions to read, for all groups or per group.
    """
    planner = _planner(local, tuple(remote.items()), tuple(topology))
    return planner.plan(local_blocks, remote_blocks, tokens)
