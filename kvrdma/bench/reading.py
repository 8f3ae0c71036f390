"""The transport of a benchmark that was told of none, and one timed read, whichever side makes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrdma.config import Config
from kvrdma.engine.opening import open_transports
from kvrdma.errors import ReadTimeoutError
from kvrdma.rows import Rows
from kvrdma.transport import Peer, PeerLost, ReadDone, ReadFailed, Transport, wait


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """One read: how long ``read`` held the caller, how long all of it took, and rows after merging."""

    blocking_s: float
    total_s: float
    rows_posted: int


def timed_read(
    transport: Transport, peer: Peer, rows: Rows, timeout_s: float, at_end: Callable[[], None] = lambda: None
) -> ReadTimes:
    """Read the rows and wait for their end.

    Args:
        transport: with no other read in flight.
        peer: of that transport.
        rows: what to read.
        timeout_s: after which it is taken for lost.
        at_end: called at once when the read is reported done, ahead of anything else; its time is not counted.

    Raises:
        ReadTimeoutError: no end within the deadline; close the transport before the memory is used again.
        TransportError: the read failed or the peer was lost.
    """
    start = time.perf_counter()
    read = transport.read(peer, rows)
    posted = time.perf_counter()
    deadline = start + timeout_s
    while True:
        for done in transport.poll():
            ended = time.perf_counter()
            if isinstance(done, ReadDone) and done.read == read:
                at_end()
                return ReadTimes(posted - start, ended - start, done.rows_posted)
            if isinstance(done, PeerLost) or (isinstance(done, ReadFailed) and done.read == read):
                raise done.reason
        left_s = deadline - time.perf_counter()
        if left_s <= 0:
            raise ReadTimeoutError(
                f"{len(rows)} rows by {transport.name} did not arrive within "
                f"{timeout_s:g} s: the peer hangs, or the link is slower than that "
                "(KVRDMA_READ_TIMEOUT_S)"
            )
        wait([transport], left_s)


def best_transport() -> str:
    """Name the first installed transport that works here and reaches other processes.

    Raises:
        ConfigError: none does; says why.
    """
    opened, _ = open_transports(Config())
    for transport in opened:
        transport.close()
    return opened[0].name
