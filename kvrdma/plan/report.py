"""What a person wants to know of a pair of engines: who reads what from whom, and what it costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from kvrdma.errors import PlanError
from kvrdma.plan.landing import ReadCost
from kvrdma.plan.planner import PageReshape, Planner
from kvrdma.plan.request import BlockSpan, TokenRange
from kvrdma.plan.sketch import CacheSketch, sketch_layout
from kvrdma.plan.tokens import Ints
from kvrdma.reshape.spec import Reshape
from kvrdma.topology import EngineShape, RankId, Source, select_sources

_LOCAL_BASE = 1 << 44
_MAX_ROWS = 1 << 25
_POSITIONS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Link:
    """What a link and its transport can do.

    Attributes:
        gigabytes_per_s: 10**9 bytes per second of one rank.
        row_ns: posting and completing one row, in nanoseconds.
        reshape_gigabytes_per_s: 10**9 bytes per second reshaped in place.
    """

    gigabytes_per_s: float
    row_ns: float = 600.0
    reshape_gigabytes_per_s: float = 1000.0

    def read_ms(self, rows: int, nbytes: int) -> float:
        """Milliseconds for one rank to read: bytes and rows overlap, the slower of both counts."""
        return max(nbytes / self.gigabytes_per_s, rows * self.row_ns) / 1e6


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines and a request of consecutive blocks on both sides."""

    consumer: EngineShape
    producer: EngineShape
    consumer_cache: CacheSketch
    producer_cache: CacheSketch
    tokens: TokenRange


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What one consumer rank reads from one producer rank; ``rows_posted`` is after merging."""

    source: Source
    tokens: int
    rows: int
    rows_posted: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one consumer rank does. Reshapes are ordered by the bytes they move, largest first."""

    rank: RankId
    sources: tuple[SourceReport, ...]
    reshapes: tuple[PageReshape, ...]

    @property
    def rows(self) -> int:
        """Rows before merging: what fragmented blocks cost."""
        return sum(source.rows for source in self.sources)

    @property
    def rows_posted(self) -> int:
        """Rows after merging: what consecutive blocks cost."""
        return sum(source.rows_posted for source in self.sources)

    @property
    def nbytes(self) -> int:
        """Bytes read."""
        return sum(source.nbytes for source in self.sources)

    def times_ms(self, link: Link) -> tuple[float, float]:
        """Milliseconds with consecutive and with fragmented blocks, reshapes included."""
        moved = sum(_moved(step.reshape, len(step.pages) * len(step.layers)) for step in self.reshapes)
        after = moved / link.reshape_gigabytes_per_s / 1e6
        best, worst = (link.read_ms(rows, self.nbytes) + after for rows in (self.rows_posted, self.rows))
        return best, worst


def _moved(reshape: Reshape, pages: int) -> int:
    return reshape.nbytes * reshape.count * pages


def report_pair(pair: Pair, cost: ReadCost | None = None) -> tuple[RankReport, ...]:
    """Plan the request on every consumer rank; ranks that differ only in whom they read are planned once.

    Raises:
        KVRDMAError: the pair cannot be served; the message says why.
        PlanError: also where the plan may have more rows than are worth the wait.
    """
    _check_rows(pair)
    planned: dict[object, RankReport] = {}
    reports: list[RankReport] = []
    for rank in pair.consumer.all_ranks():
        sources = select_sources(pair.consumer, rank, pair.producer)
        kind = _kind(pair, rank, sources)
        if kind not in planned:
            planned[kind] = _report_rank(pair, rank, sources, cost)
        reports.append(_moved_to(planned[kind], rank, sources))
    return tuple(reports)


def _check_rows(pair: Pair) -> None:
    """Refuse a plan that may be huge: every head apart, in the shortest runs of tokens that a side stores together."""
    sides = ((pair.consumer, pair.consumer_cache), (pair.producer, pair.producer_cache))
    run = min(min(cache.block_size, shape.interleave if shape.dcp_size > 1 else 1 << 60) for shape, cache in sides)
    lo, hi = pair.consumer.heads(0)
    layers = max((len(stage) for stage in pair.consumer.stages), default=len(pair.consumer_cache.layers))
    rows = -(-(pair.tokens.end - pair.tokens.start) // run) * (hi - lo) * layers
    if rows > _MAX_ROWS:
        raise PlanError(
            f"a rank may read {rows:,} rows ({layers} layers, {hi - lo} heads, runs of {run} tokens): more than the "
            f"{_MAX_ROWS:,} that are planned here; ask for fewer tokens or layers, the figures grow in proportion"
        )


def _kind(pair: Pair, rank: RankId, sources: tuple[Source, ...]) -> object:
    """What the plan of a rank depends on: heads count from the rank's first, and no rank is named."""
    lo, hi = pair.consumer.heads(rank.rank)
    read = tuple(
        (s.rank.pp_rank, pair.producer.dcp_rank(s.rank.rank), *(h - lo for h in (*s.heads, *of)))
        for s in sources
        for of in [pair.producer.heads(s.rank.rank)]
    )
    return rank.pp_rank, pair.consumer.dcp_rank(rank.rank), hi - lo, read


def _moved_to(report: RankReport, rank: RankId, sources: tuple[Source, ...]) -> RankReport:
    moved = tuple(replace(of, source=source) for of, source in zip(report.sources, sources, strict=True))
    return replace(report, rank=rank, sources=moved)


def _span(shape: EngineShape, cache: CacheSketch, end: int) -> BlockSpan:
    return BlockSpan(np.arange(-(-end // (cache.block_size * shape.dcp_size))))


def _report_rank(pair: Pair, rank: RankId, sources: tuple[Source, ...], cost: ReadCost | None) -> RankReport:
    spans = [
        _span(shape, cache, pair.tokens.end)
        for shape, cache in ((pair.consumer, pair.consumer_cache), (pair.producer, pair.producer_cache))
    ]
    # One block more than the request has, so that layers that follow one another do not merge by accident.
    caches = [
        replace(cache, num_blocks=len(span.ids) + 1)
        for cache, span in zip((pair.consumer_cache, pair.producer_cache), spans, strict=True)
    ]
    remote = {s.rank: sketch_layout(pair.producer, s.rank, caches[1]) for s in sources}
    local = sketch_layout(pair.consumer, rank, caches[0], _LOCAL_BASE)
    plan = Planner(local, remote, sources, cost).plan([spans[0]], [spans[1]], pair.tokens)
    counts = token_counts(pair, rank)
    reports = tuple(
        SourceReport(
            s.source,
            counts.get(s.source.rank.rank % pair.producer.dcp_size, 0),
            s.rows_before,
            len(s.batch),
            s.nbytes,
        )
        for s in plan.sources
    )
    steps = sorted(plan.reshapes, key=lambda s: -_moved(s.reshape, len(s.pages) * len(s.layers)))
    return RankReport(rank, reports, tuple(steps))


def token_counts(pair: Pair, rank: RankId) -> dict[int, int]:
    """Tokens of the request that ``rank`` takes from each dcp rank of the producer."""
    counts: Counter[int] = Counter()
    for start in range(pair.tokens.start, pair.tokens.end, _POSITIONS_AT_ONCE):
        owner = owners(pair, rank, np.arange(start, min(start + _POSITIONS_AT_ONCE, pair.tokens.end)))
        found, of = np.unique(owner[owner >= 0], return_counts=True)
        counts.update(dict(zip(found.tolist(), of.tolist(), strict=True)))
    return counts


def owners(pair: Pair, rank: RankId, positions: Ints) -> Ints:
    """Producer dcp rank of each position, or -1 where the consumer rank does not hold the position."""
    mine, theirs = pair.consumer, pair.producer
    held = positions // mine.interleave % mine.dcp_size == mine.dcp_rank(rank.rank)
    return np.where(held, positions // theirs.interleave % theirs.dcp_size, -1)
