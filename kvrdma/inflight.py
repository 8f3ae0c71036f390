"""Reads with deadlines, over any transport.

A transport never gives up on a read, because it cannot take back what it has posted: a frozen peer means a
read that never ends. ``InFlight`` adds the deadline. When it passes, the caller learns of the failure at
once, and the destination stays quarantined until the transport says that nothing will be written any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvrdma.errors import ConfigError, ReadTimeoutError
from kvrdma.rows import Batch, RowTable
from kvrdma.transport import Completion, Peer, PeerLost, ReadFailed, ReadId, Transport


@dataclass(frozen=True, slots=True)
class ReadReleased:
    """The transport has ended a read that had timed out: its destination may be used again."""

    read: ReadId


Outcome: TypeAlias = Completion | ReadReleased


@dataclass(slots=True)
class _Read:
    peer: Peer
    deadline_s: float
    timeout_s: float
    timed_out: bool = False


class InFlight:
    """The reads of one transport that have not ended, each with its deadline. For one thread at a time."""

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        """Watch reads on ``transport`` by ``clock`` (seconds, monotonic).

        All reads of the transport must be posted and polled through this object.
        """
        self._transport = transport
        self._clock = clock
        self._reads: dict[ReadId, _Read] = {}

    @property
    def quarantined(self) -> tuple[ReadId, ...]:
        """Reads that timed out and may still write into their destination."""
        return tuple(read for read, entry in self._reads.items() if entry.timed_out)

    def read(self, peer: Peer, rows: Batch, timeout_s: float, then: RowTable | None = None) -> ReadId:
        """Post a batch that is reported as failed if it has not ended after ``timeout_s`` seconds.

        Raises:
            ConfigError: ``timeout_s`` is not positive.
            RowsError, PeerLostError: as ``Transport.read``.
        """
        if not timeout_s > 0:
            raise ConfigError(f"read timeout_s={timeout_s}: must be positive")
        read = self._transport.read(peer, rows, then)
        self._reads[read] = _Read(peer, self._clock() + timeout_s, timeout_s)
        return read

    def poll(self) -> list[Outcome]:
        """Return what has ended or timed out since the last call. Every read appears once as done or failed.

        A timed-out read appears as ``ReadFailed`` with ``ReadTimeoutError``, and later as ``ReadReleased``.
        """
        outcomes: list[Outcome] = []
        for completion in self._transport.poll():
            entry = None if isinstance(completion, PeerLost) else self._reads.pop(completion.read, None)
            late = entry is not None and entry.timed_out
            outcomes.append(ReadReleased(completion.read) if late else completion)  # type: ignore[union-attr]
        now_s = self._clock()
        for read, entry in self._reads.items():
            if not entry.timed_out and now_s >= entry.deadline_s:
                entry.timed_out = True
                reason = ReadTimeoutError(
                    f"read {read} from peer {entry.peer.id} ({entry.peer.via}) did not end within "
                    f"{entry.timeout_s:g} s; its destination is quarantined until it does"
                )
                outcomes.append(ReadFailed(read, entry.peer.id, reason))
        return outcomes

    def next_deadline_s(self) -> float | None:
        """When ``poll`` has to be called at the latest, on the clock given; None if nothing can time out."""
        return min((entry.deadline_s for entry in self._reads.values() if not entry.timed_out), default=None)
