"""The two ends of a contract test: a target whose bytes anybody can recompute, a reader full of poison."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvrdma.rows import Rows, as_rows
from kvrdma.testing.peer import PeerProcess
from kvrdma.transport import Completion, Device, Peer, PeerLost, ReadDone, ReadId, Transport, poll_until

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Factory = Callable[[], Transport]

POISON = 0xA5
PAGE = mmap.PAGESIZE


def pattern(seed: int, nbytes: int) -> Bytes:
    """Give ``nbytes`` pseudo-random bytes, none of them equal to ``POISON``, the same for the same seed."""
    values = np.random.default_rng(seed).integers(0, 255, nbytes, dtype=np.uint8)
    values[values >= POISON] += 1
    return values


# What a target does; each function runs where the target lives.


def open_target(state: SimpleNamespace, factory: Factory, sizes: Sequence[int], seed: int) -> None:
    """Open a transport and register one region per size, filled with ``pattern(seed + index)``."""
    state.transport = factory()
    state.buffers = [pattern(seed + index, nbytes) for index, nbytes in enumerate(sizes)]
    state.regions = [register(state.transport, buffer) for buffer in state.buffers]


def open_sparse_target(state: SimpleNamespace, factory: Factory, nbytes: int, places: Sequence[int]) -> None:
    """Open a transport and register one huge region, zero but for 4 KiB of pattern at each of ``places``."""
    state.transport = factory()
    buffer = np.zeros(nbytes, np.uint8)
    for index, place in enumerate(places):
        buffer[place : place + 4096] = pattern(index, 4096)
    state.buffers, state.regions = [buffer], [register(state.transport, buffer)]


def exports(state: SimpleNamespace) -> tuple[bytes, list[bytes]]:
    """Give what a reader needs: the address and the keys."""
    return state.transport.address(), [region.key for region in state.regions]


def refill(state: SimpleNamespace, seed: int) -> None:
    """Change every byte of every region in place."""
    for index, buffer in enumerate(state.buffers):
        buffer[:] = pattern(seed + index, len(buffer))


def deregister(state: SimpleNamespace, index: int) -> None:
    """Deregister one region; its memory stays."""
    state.transport.deregister(state.regions[index])


def reregister(state: SimpleNamespace, index: int) -> None:
    """Register the memory of one region again."""
    state.regions[index] = register(state.transport, state.buffers[index])


def close_target(state: SimpleNamespace) -> None:
    """Close the transport; the memory stays."""
    state.transport.close()


def register(transport: Transport, buffer: Bytes) -> Any:  # noqa: ANN401 - a Region
    """Register a numpy buffer."""
    return transport.register(buffer.ctypes.data, buffer.nbytes, Device())


class Target:
    """Runs target functions here, or in ``process`` if one is given."""

    def __init__(self, process: PeerProcess | None) -> None:
        self.process = process
        self._state = SimpleNamespace()

    def call(self, function: Callable[..., T], *args: Any) -> T:  # noqa: ANN401
        """Run ``function(state, *args)`` where the target lives."""
        return self.process.call(function, *args) if self.process else function(self._state, *args)

    def close(self) -> None:
        """Close its transport if it was opened, and its process."""
        if self.process:
            self.process.close()
        elif hasattr(self._state, "transport"):
            self._state.transport.close()


@dataclass(slots=True)
class Reader:
    """The reading end: a transport and one registered buffer full of poison."""

    transport: Transport
    buffer: Bytes
    region: Any
    timeout_s: float = 60.0

    @classmethod
    def open(cls, transport: Transport, nbytes: int, timeout_s: float = 60.0) -> Reader:
        """Register ``nbytes`` of poison with ``transport``."""
        buffer = np.full(nbytes, POISON, np.uint8)
        return cls(transport, buffer, register(transport, buffer), timeout_s)

    def rows(self, pieces: Sequence[tuple[int, int, int, int]]) -> Rows:
        """Build rows from (offset in this buffer, remote region, remote offset, length)."""
        rows = as_rows(pieces)
        rows[:, 0] += np.uint64(self.buffer.ctypes.data)
        return rows

    def read(self, peer: Peer, rows: Rows, timeout_s: float | None = None) -> Completion:
        """Post a batch and return how it ended."""
        return self.finish(self.transport.read(peer, rows), timeout_s)

    def finish(self, read: ReadId, timeout_s: float | None = None) -> Completion:
        """Return how a posted read ended."""
        return poll_until(self.transport, read, self.timeout_s if timeout_s is None else timeout_s)[-1]

    def drain(self, reads: set[ReadId]) -> dict[ReadId, Completion]:
        """Poll until every one of ``reads`` has ended; asserts that none ends twice and none is unknown."""
        ended: dict[ReadId, Completion] = {}
        while reads - set(ended):
            for completion in poll_until(self.transport, min(reads - set(ended)), self.timeout_s):
                if isinstance(completion, PeerLost):
                    continue
                assert completion.read in reads, f"unknown read {completion.read}"
                assert completion.read not in ended, f"read {completion.read} ended twice"
                ended[completion.read] = completion
        return ended

    def check(self, rows: Rows, sources: Sequence[Bytes]) -> None:
        """Assert that exactly the destinations of ``rows`` changed, to exactly the bytes of ``sources``."""
        expected = np.full(len(self.buffer), POISON, np.uint8)
        base = self.buffer.ctypes.data
        for local, region, offset, length in rows.tolist():
            expected[local - base : local - base + length] = sources[region][offset : offset + length]
        wrong = np.flatnonzero(self.buffer != expected)
        assert wrong.size == 0, (
            f"{wrong.size} bytes differ, the first at {wrong[0]}: "
            f"{self.buffer[wrong[0]]:#x} where {expected[wrong[0]]:#x} is right"
        )


def scattered(count: int, block: int, pool: int, seed: int) -> list[tuple[int, int, int, int]]:
    """Draw ``count`` pieces: distinct blocks out of ``pool`` on both sides, in random order."""
    rng = np.random.default_rng(seed)
    local, remote = rng.permutation(pool)[:count], rng.permutation(pool)[:count]
    return [(int(a) * block, 0, int(b) * block, block) for a, b in zip(local, remote, strict=True)]


def done(completion: Completion) -> ReadDone:
    """Assert that a read is done and return it."""
    assert isinstance(completion, ReadDone), completion
    return completion
