"""What a link test measures beyond one read at a time: the other direction, streams, latencies, hours, a restart."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvrdma.bench.link import Link
from kvrdma.bench.patterns import Case, Shape, find_mismatch, rows_of
from kvrdma.bench.report import ChaosReport, LatencyReport, ReverseReport, SoakReport, Stat, StreamsReport
from kvrdma.errors import KVRDMAError, PeerLostError, ReadTimeoutError, TransportError
from kvrdma.rows import Rows
from kvrdma.transport import Peer, PeerLost, ReadDone, ReadId, wait

_BUCKETS_PER_DOUBLING = 4
_CDF_POINTS = 200
_PERCENTS = (50.0, 90.0, 99.0, 99.9)
_SOAK_STEP_S = 1.0


def measure_reverse(link: Link, case: Case, iters: int) -> ReverseReport:
    """Let the peer read the case from here, several times.

    Raises:
        KVRDMAError: it cannot, or its read failed; wrong bytes are reported, not raised.
    """
    link.pull_back(case)
    times, right, last = [], True, None
    for _ in range(iters):
        last = link.pull_back(case)
        right = right and not last.mismatch
        times.append(last.total_s)
    assert last
    total, speed = stats_of(times, case.shape.nbytes)
    shape = case.shape
    return ReverseReport(case.pattern, shape.block_bytes, shape.nbytes, right, last.one_sided, last.via, total, speed)


def stats_of(times: Sequence[float], nbytes: int) -> tuple[Stat, Stat]:
    """Give best and median in milliseconds and in GB/s."""
    best, median = min(times), statistics.median(times)
    speeds = Stat(round(nbytes / best / 1e9, 4), round(nbytes / median / 1e9, 4))
    return Stat(round(best * 1e3, 4), round(median * 1e3, 4)), speeds


def measure_streams(link: Link, case: Case, streams: int, iters: int) -> StreamsReport:
    """Read the case over ``streams`` connections at once, each a share of the rows.

    Raises:
        TransportError: a connection or a read failed.
    """
    peers = [link.peer, *(link.connect_again() for _ in range(streams - 1))]
    parts = [np.ascontiguousarray(part) for part in np.array_split(rows_of(case, link.pool.addr), streams)]
    times, right = [], True
    try:
        for _ in range(iters + 1):
            generation = link.refresh()
            times.append(_read_all(link, peers, parts))
            right = right and find_mismatch(link.pool.host_bytes(), case, generation) is None
    finally:
        for peer in peers[1:]:
            link.transport.disconnect(peer)
    total, speed = stats_of(times[1:], case.shape.nbytes)
    shape = case.shape
    return StreamsReport(streams, case.pattern, shape.block_bytes, shape.nbytes, right, total, speed)


def _read_all(link: Link, peers: Sequence[Peer], parts: Sequence[Rows]) -> float:
    began_s = time.perf_counter()
    waiting = {link.transport.read(peer, part) for peer, part in zip(peers, parts, strict=True)}
    while waiting:
        waiting -= set(_ended(link, began_s + link.options.read_timeout_s))
    return time.perf_counter() - began_s


def _ended(link: Link, deadline_s: float) -> list[ReadId]:
    """Wait for reads to end well.

    Raises:
        TransportError: one failed, the peer was lost, or the deadline passed.
    """
    left_s = deadline_s - time.perf_counter()
    if left_s <= 0:
        raise ReadTimeoutError(f"reads did not end within {link.options.read_timeout_s:g} s (KVRDMA_READ_TIMEOUT_S)")
    wait([link.transport], left_s)
    done: list[ReadId] = []
    for completion in link.transport.poll():
        if not isinstance(completion, ReadDone):
            raise completion.reason
        done.append(completion.read)
    return done


def measure_latency(link: Link, nbytes: int, depth: int, reads: int) -> LatencyReport:
    """Make ``reads`` reads of one row, ``depth`` in flight, and time each.

    Args:
        link: whose pool has room for ``2 * depth`` rows.
        nbytes: of a row, a multiple of 8.
        depth: reads in flight.
        reads: how many are timed; as many as ``depth`` go before.

    Raises:
        TransportError: one failed, or nothing ended within the deadline.
    """
    case = Case("contig", Shape(1, depth, nbytes))
    rows = rows_of(case, link.pool.addr)
    generation = link.refresh()
    times_s: list[float] = []
    posted: dict[ReadId, tuple[float, int]] = {}
    for index in range(depth):
        posted[link.transport.read(link.peer, rows[index : index + 1])] = time.perf_counter(), index
    began_s, to_post = time.perf_counter(), reads
    now_s = began_s
    while posted:
        ended = _ended(link, now_s + link.options.read_timeout_s)
        if not ended:
            continue
        now_s = time.perf_counter()
        for read in ended:
            at_s, index = posted.pop(read)
            times_s.append(now_s - at_s)
            if to_post:
                to_post -= 1
                at_s = time.perf_counter()  # before the post: the time it takes is the reader's
                posted[link.transport.read(link.peer, rows[index : index + 1])] = at_s, index
    seconds = time.perf_counter() - began_s
    right = find_mismatch(link.pool.host_bytes(), case, generation) is None
    return latency_report(nbytes, depth, times_s[depth:], seconds, verified=right)


def latency_report(
    nbytes: int, depth: int, times_s: Sequence[float], seconds: float, *, verified: bool
) -> LatencyReport:
    """Sum up the times of single reads."""
    micros = np.sort(np.asarray(times_s)) * 1e6
    marks = {f"{p:g}": round(float(_at(micros, p)), 3) for p in _PERCENTS} | {"max": round(float(micros[-1]), 3)}
    bucket = np.ceil(np.log2(np.maximum(micros, 1e-3)) * _BUCKETS_PER_DOUBLING).astype(int)
    numbers, counts = np.unique(bucket, return_counts=True)
    bounds = np.exp2(numbers / _BUCKETS_PER_DOUBLING)
    points = [_at(micros, 100 * (i + 1) / _CDF_POINTS) for i in range(_CDF_POINTS)]
    return LatencyReport(
        nbytes=nbytes,
        depth=depth,
        reads=len(micros),
        verified=verified,
        reads_per_s=round(len(micros) / seconds, 1),
        mean_us=round(float(micros.mean()), 3),
        percentiles_us=marks,
        histogram=[(round(float(b), 3), int(n)) for b, n in zip(bounds, counts, strict=True)],
        cdf_us=[round(float(p), 3) for p in points],
    )


def _at(ordered: np.ndarray[tuple[int], np.dtype[np.float64]], percent: float) -> float:
    """Give the nearest-rank percentile of values in order."""
    return float(ordered[max(0, math.ceil(round(percent * len(ordered) / 100, 6)) - 1)])


def soak_speeds(reading: float, average: float) -> str:
    """Say how fast the reads of a soak were, in GB/s, and how fast all of it was."""
    numbers = (f"{speed:.2f}" if speed >= 0.1 else f"{speed:.2g}" for speed in (reading, average))
    return "{} GB/s while reading, {} GB/s over all".format(*numbers)


def _gb_per_s(nbytes: int, seconds: float) -> float:
    return nbytes / max(seconds, 1e-9) / 1e9


def soak(
    open_link: Callable[[], Link], case: Case, duration_s: float, rate_bytes: float | None, tell: Callable[[str], None]
) -> SoakReport:
    """Read and verify for a long time; a failed read is counted, and the link opened anew.

    Args:
        open_link: gives a link; called again after each failure.
        case: what to read, another draw of blocks each time.
        duration_s: how long.
        rate_bytes: bytes a second at most; None: as many as possible.
        tell: is told a line about every tenth of the time.
    """
    link = open_link()
    began_s = time.monotonic()
    times: list[float] = []
    failures: dict[str, int] = {}
    wrong: list[str] = []
    start = resources()
    next_s, told = began_s, 0
    try:
        while (now_s := time.monotonic()) - began_s < duration_s:
            tenth = int(10 * (now_s - began_s) / duration_s)
            if tenth > told:
                told = tenth
                start = resources() if tenth == 1 else start
                done = len(times) * case.shape.nbytes
                speeds = soak_speeds(_gb_per_s(done, sum(times)), _gb_per_s(done, now_s - began_s))
                counts = f"{len(times)} reads, {sum(failures.values())} failed, {len(wrong)} wrong"
                tell(f"{now_s - began_s:.0f} s: {counts}, {speeds}")
            try:
                measured, mismatch = link.read_and_verify(replace(case, seed=len(times) % 16 + 1))
            except KVRDMAError as error:
                failures[type(error).__name__] = failures.get(type(error).__name__, 0) + 1
                link.close()
                time.sleep(min(_SOAK_STEP_S, duration_s))
                link = _open_again(open_link, link, failures)
                continue
            times.append(measured.total_s)
            wrong += [str(mismatch)] if mismatch and len(wrong) < 20 else []
            next_s = _pace(next_s, case.shape.nbytes, rate_bytes)
    finally:
        link.close()
    end = resources()
    seconds = time.monotonic() - began_s
    micros = np.sort(np.asarray(times or [0.0]))
    marks = {f"{p:g}": round(_at(micros, p) * 1e3, 3) for p in _PERCENTS} | {"max": round(float(micros[-1]) * 1e3, 3)}
    nbytes = len(times) * case.shape.nbytes
    speed, average = (round(_gb_per_s(nbytes, time_s), 4) for time_s in (sum(times), seconds))
    growth = end[0] - start[0], end[1] - start[1]
    return SoakReport(round(seconds, 3), len(times), nbytes, failures, wrong, speed, average, marks, *growth)


def _open_again(open_link: Callable[[], Link], old: Link, failures: dict[str, int]) -> Link:
    try:
        return open_link()
    except KVRDMAError as error:
        failures[type(error).__name__] = failures.get(type(error).__name__, 0) + 1
        return old  # closed: its next read fails at once, and the next try is made


def _pace(next_s: float, nbytes: int, rate_bytes: float | None) -> float:
    if rate_bytes is None:
        return next_s
    next_s = max(next_s + nbytes / rate_bytes, time.monotonic() - _SOAK_STEP_S)
    time.sleep(max(0.0, next_s - time.monotonic()))
    return next_s


def resources() -> tuple[int, int]:
    """Give this process's resident memory in KiB and its open descriptors."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]), len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - one call
    return 0, 0


def chaos(link: Link, case: Case, kill: Callable[[], None], reopen: Callable[[], Link]) -> ChaosReport:
    """Let the peer go away while reads are in flight, and meet it again.

    Args:
        link: closed here.
        case: what is read.
        kill: ends the peer.
        reopen: gives a link to the one that follows.

    Raises:
        KVRDMAError: no error came within the read's deadline, or the next peer cannot be read.
    """
    rows = rows_of(case, link.pool.addr)
    killed_s, error = 0.0, ""
    try:
        link.refresh()
        for _ in range(4):
            link.transport.read(link.peer, rows)
        kill()
        killed_s = time.perf_counter()
        while not error:
            error = _until_lost(link, rows, killed_s)
    finally:
        link.close()
    noticed_s = time.perf_counter()
    second = reopen()
    try:
        _, wrong = second.read_and_verify(case)
        recovered_s = time.perf_counter() - noticed_s
    finally:
        second.close()
    return ChaosReport(
        error, round((noticed_s - killed_s) * 1e3, 3), round(recovered_s * 1e3, 3), verified=wrong is None
    )


def _until_lost(link: Link, rows: Rows, killed_s: float) -> str:
    """Read on until something fails; gives its name, or ``""`` as long as all ends well."""
    if time.perf_counter() - killed_s > link.options.read_timeout_s:
        raise PeerLostError(f"the peer is gone, and {link.options.read_timeout_s:g} s later no read had failed")
    try:
        link.transport.read(link.peer, rows)
    except TransportError as error:
        return type(error).__name__
    wait([link.transport], 0.1)
    for done in link.transport.poll():
        if isinstance(done, PeerLost) or not isinstance(done, ReadDone):
            return type(done.reason).__name__
    return ""
