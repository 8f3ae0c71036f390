"""What it takes to look a long prefix up in a store, beside what this host takes for messages of the same sizes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Self

from kvrdma.bench.echo import Echo, SocketEcho
from kvrdma.bench.engine import Shape
from kvrdma.bench.stores import StoreProcess, User, room
from kvrdma.bench.waits import waits_of
from kvrdma.store.keys import KEY_NBYTES

_STORE_BUSY_S = 0.0002
"""What a store takes for a lookup of 512 blocks."""


class Asking:
    """A store with one long prefix, and who looks it up: each time a message and its answer. A context manager."""

    def __init__(self, transport: str, blocks: int) -> None:
        """Open both, in two processes."""
        shape = Shape(layers=1, heads=1, head_dim=16, tokens=16 * blocks, blocks=blocks)
        self.store = StoreProcess(room(shape), transport)
        self.user = User(shape, self.store.endpoint, transport, "asking")
        self.user.put()
        found = self.user.lookup()
        self.sizes = KEY_NBYTES * blocks, len(found.reference)
        """Of keys and answer, in bytes."""
        self.user.release(found)

    def __enter__(self) -> Self:
        """Ready to ask."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close both."""
        self.user.close()
        self.store.close()


def lookups(transport: str, count: int, blocks: int = 512) -> dict[str, object]:
    """Time lookups of long prefixes, with leases taken and given back in between.

    In turns with them bare messages of the same sizes make the same way to a process that is busy for as long as a
    store's median, and as many bytes go over one socket to a process that does nothing: how often those are late is
    this host's doing.

    ``within_1_ms_but_for_waits``: the same without what the threads of both processes waited for a processor beyond
    their median, while the kernel ran something else there.
    """
    hashing, asking, waited = [], [], []
    with Asking(transport, blocks) as asked:
        ours = waits_of((os.getpid(), asked.store.pid))
        with ours as waits_s, Echo(*asked.sizes, _STORE_BUSY_S) as echo, SocketEcho(*asked.sizes) as sockets:
            echoed, bare = [], []
            for _ in range(count):
                began_s = time.perf_counter()
                keys = asked.user.prompt().keys
                before_s = waits_s()
                hashed_s = time.perf_counter()
                answer = asked.user.ask(keys)
                asking.append(time.perf_counter() - hashed_s)
                waited.append(waits_s() - before_s)
                hashing.append(hashed_s - began_s)
                asked.user.release(answer)
                echoed.append(echo.ask())
                bare.append(sockets.ask())
    return {
        "case": "lookup",
        "transport": transport,
        "blocks": blocks,
        "lookups": count,
        "messages_each": 1,
        **_spread(asking),
        "within_1_ms_but_for_waits": _spread(_without_waits(asking, waited))["within_1_ms"],
        **{f"echo_{name}": value for name, value in _spread(echoed).items()},
        **{f"socket_{name}": value for name, value in _spread(bare).items()},
        "hash_median_ms": round(statistics.median(hashing) * 1e3, 3),
    }


def lookups_alone(transport: str, count: int, blocks: int = 512) -> dict[str, object]:
    """Time lookups with both processes on one processor, and nothing in turns with them.

    The host's other threads, the kernel's among them, have another one then, so that no lookup waits for them.
    """
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(processors)})  # threads and processes that are started now do as this one does
    try:
        with Asking(transport, blocks) as asked:
            keys, asking = asked.user.prompt().keys, []
            for _ in range(count):
                began_s = time.perf_counter()
                answer = asked.user.ask(keys)
                asking.append(time.perf_counter() - began_s)
                asked.user.release(answer)
    finally:
        os.sched_setaffinity(0, processors)
    return {
        "case": "lookup on one processor",
        "transport": transport,
        "blocks": blocks,
        "lookups": count,
        "messages_each": 1,
        **_spread(asking),
    }


def _without_waits(times_s: Sequence[float], waited_s: Sequence[float]) -> list[float]:
    usual_s = statistics.median(waited_s)
    return [time_s - max(0.0, wait_s - usual_s) for time_s, wait_s in zip(times_s, waited_s, strict=True)]


def _spread(times_s: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    return {
        "median_ms": round(statistics.median(ordered) * 1e3, 3),
        "p99_ms": round(ordered[int(0.99 * (len(ordered) - 1))] * 1e3, 3),
        "worst_ms": round(ordered[-1] * 1e3, 3),
        "within_1_ms": round(sum(each <= 1e-3 for each in ordered) / len(ordered), 4),
    }
