"""What a link test found out, in the form that ``--json`` prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrdma.bench.patterns import Case


class Stat(msgspec.Struct, frozen=True):
    """The best and the median of several iterations."""

    best: float
    median: float


class CaseReport(msgspec.Struct, frozen=True):
    """One case: its size, whether every byte was right, and its times."""

    pattern: str
    block_bytes: int
    rows: int
    rows_posted: int
    """After merging."""
    nbytes: int
    verified: bool
    blocking_us: Stat
    """How long ``Transport.read`` held its caller."""
    total_ms: Stat
    """From the call of ``read`` until ``poll`` reported the end."""
    gb_per_s: Stat
    memcpy_gb_per_s: float
    """One thread copying the same rows within this process, alternating with the reads; median."""
    memcpy_ratio: float
    """Median of the reads over the median of the copies."""


class ReverseReport(msgspec.Struct, frozen=True):
    """Reads of the peer from this side."""

    pattern: str
    block_bytes: int
    nbytes: int
    verified: bool
    one_sided: bool
    via: str
    total_ms: Stat
    gb_per_s: Stat


class StreamsReport(msgspec.Struct, frozen=True):
    """One read split over several connections."""

    streams: int
    pattern: str
    block_bytes: int
    nbytes: int
    verified: bool
    total_ms: Stat
    gb_per_s: Stat


class LatencyReport(msgspec.Struct, frozen=True):
    """Many small reads, each timed from its post until ``poll`` has reported it; microseconds."""

    nbytes: int
    depth: int
    """Reads in flight."""
    reads: int
    verified: bool
    reads_per_s: float
    mean_us: float
    percentiles_us: dict[str, float]
    """``"50"``, ``"90"``, ``"99"``, ``"99.9"``, ``"max"``."""
    histogram: list[tuple[float, int]]
    """Upper bounds, a quarter of a doubling apart, and how many reads were below each and above the one before."""
    cdf_us: list[float]
    """Latencies at equal steps of the share of reads, for plots."""


class SoakReport(msgspec.Struct, frozen=True):
    """Verified reads for a long time."""

    seconds: float
    reads: int
    nbytes: int
    failures: dict[str, int]
    wrong: list[str]
    gb_per_s: float
    """While reading: over the time of the reads alone."""
    average_gb_per_s: float
    """Over all: pauses for the rate, verification and failures count, too."""
    percentiles_ms: dict[str, float]
    rss_growth_kib: int
    """From the first tenth to the end."""
    descriptors_growth: int


class ChaosReport(msgspec.Struct, frozen=True):
    """The peer went away in mid-read and came back."""

    error: str
    noticed_ms: float
    """From the kill to the error."""
    recovered_ms: float
    """From the error to the next verified read."""
    verified: bool


class LinkReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A whole link test."""

    kvrdma: str
    transport: str
    one_sided: bool
    device: str
    ucx: dict[str, str] | None
    verified: bool
    connect_ms: float
    first_read_ms: float
    cases: list[CaseReport]
    reverse: ReverseReport | None = None
    streams: StreamsReport | None = None
    latency: LatencyReport | None = None
    soak: SoakReport | None = None
    chaos: ChaosReport | None = None

    def to_builtins(self) -> dict[str, Any]:
        """Give dicts, lists and numbers."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class Times(msgspec.Struct):
    """Seconds measured in one case, an entry per iteration."""

    blocking_s: list[float] = []
    total_s: list[float] = []
    memcpy_s: list[float] = []


def case_report(case: Case, times: Times, rows_posted: int, *, verified: bool) -> CaseReport:
    """Sum one case up."""
    shape = case.shape
    total = _stat(times.total_s)
    memcpy_s = statistics.median(times.memcpy_s)
    return CaseReport(
        pattern=case.pattern,
        block_bytes=shape.block_bytes,
        rows=shape.rows,
        rows_posted=rows_posted,
        nbytes=shape.nbytes,
        verified=verified,
        blocking_us=_scaled(_stat(times.blocking_s), 1e6),
        total_ms=_scaled(total, 1e3),
        gb_per_s=Stat(round(shape.nbytes / total.best / 1e9, 4), round(shape.nbytes / total.median / 1e9, 4)),
        memcpy_gb_per_s=round(shape.nbytes / memcpy_s / 1e9, 4),
        memcpy_ratio=round(memcpy_s / total.median, 4),
    )


def _stat(values: Sequence[float]) -> Stat:
    return Stat(min(values), statistics.median(values))


def _scaled(stat: Stat, factor: float) -> Stat:
    return Stat(round(stat.best * factor, 4), round(stat.median * factor, 4))
