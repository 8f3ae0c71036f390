"""``FaultTransport``: a real transport whose reads go wrong in chosen ways."""

from __future__ import annotations

import itertools
import os
import select
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from kvrdma.errors import PeerLostError, TransportClosedError, TransportError
from kvrdma.rows import as_rows, check_rows
from kvrdma.transport import PeerLost, ReadDone, ReadFailed, ReadId, poll_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvrdma.rows import Batch as RowBatch
    from kvrdma.rows import Rows, RowTable
    from kvrdma.transport import Capabilities, Completion, Device, Peer, Region, Transport


class Fault(Enum):
    """What happens to one read."""

    NONE = "it works"
    FAIL_AT_POST = "read() raises PeerLostError; nothing is posted"
    FAIL_AT_POLL = "nothing is moved and the read ends as failed"
    HALF_WRITTEN = "the first half of its rows arrives, then the read ends as failed"
    INLINE = "it is complete before read() returns"
    LATE = "it moves its bytes and completes only after release(); a disconnect fails it"
    STUCK = "as LATE, but neither disconnect nor close ends it: only release() does"
    NEVER = "it never completes"
    LOSE_PEER = "it fails and its peer is lost"


class _Batch(NamedTuple):
    rows: Rows
    then: Rows


@dataclass(slots=True)
class _Held:
    read: ReadId
    peer: Peer
    batch: _Batch
    stuck: bool


class FaultTransport:
    """Wraps a transport; each read takes the next fault of the list, and works when the list is used up."""

    name: ClassVar[str] = "fault"

    def __init__(self, inner: Transport, faults: Iterable[Fault] = ()) -> None:
        self._inner = inner
        self._faults = deque(faults)
        self._ids = itertools.count(1)
        self._names: dict[ReadId, ReadId] = {}
        self._ready: deque[Completion] = deque()
        self._held: list[_Held] = []
        self._lost: set[int] = set()
        self._regions: dict[int, Region] = {}
        self._lock = threading.RLock()  # an inner completion must not be polled before its id is known
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False  # threads that still run would meet another file
        self._either = select.epoll()
        self._either.register(self._fd, select.EPOLLIN)
        self._either.register(inner.fileno(), select.EPOLLIN)
        self._closed = False

    def inject(self, *faults: Fault) -> None:
        """Queue faults for the next reads."""
        self._faults.extend(faults)

    def release(self) -> int:
        """Let every ``LATE`` and ``STUCK`` read happen now; returns how many.

        A stuck read whose peer was disconnected meanwhile ends as failed.
        """
        held, self._held = self._held, []
        for late in held:
            try:
                self._post(late.read, late.peer, late.batch)
            except TransportError:
                self._fail(late.read, late.peer, late.batch)
        return len(held)

    def capabilities(self) -> Capabilities:
        """As the wrapped transport."""
        return self._inner.capabilities()

    def register(self, addr: int, nbytes: int, device: Device) -> Region:
        """As the wrapped transport."""
        region = self._inner.register(addr, nbytes, device)
        self._regions[region.id] = region
        return region

    def deregister(self, region: Region) -> None:
        """As the wrapped transport."""
        self._inner.deregister(region)
        self._regions.pop(region.id, None)

    def address(self) -> bytes:
        """As the wrapped transport."""
        return self._inner.address()

    def connect(self, address: bytes, keys: Sequence[bytes]) -> Peer:
        """As the wrapped transport."""
        return self._inner.connect(address, keys)

    def read(self, peer: Peer, rows: RowBatch, then: RowTable | None = None) -> ReadId:
        """Post the batch with the next fault; rows are checked whatever it is."""
        batch = _Batch(as_rows(rows), as_rows([] if then is None else then))
        local = [(region.addr, region.nbytes) for region in self._regions.values()]
        check_rows(np.concatenate(batch), local, [region.nbytes for region in peer.regions])
        with self._lock:
            return self._read(peer, batch)

    def _read(self, peer: Peer, batch: _Batch) -> ReadId:
        if self._closed:
            raise TransportClosedError(f"{self.name} transport is closed")
        fault = self._faults.popleft() if self._faults else Fault.NONE
        if fault is Fault.FAIL_AT_POST or peer.id in self._lost:
            raise PeerLostError(f"peer {peer.id} was lost: injected")
        read = ReadId(next(self._ids))
        self._apply(fault)(read, peer, batch)
        return read

    def _apply(self, fault: Fault) -> Callable[[ReadId, Peer, _Batch], None]:
        how: dict[Fault, Callable[[ReadId, Peer, _Batch], None]] = {
            Fault.NONE: self._post,
            Fault.FAIL_AT_POLL: self._fail,
            Fault.HALF_WRITTEN: self._write_half,
            Fault.INLINE: self._complete_inline,
            Fault.LATE: partial(self._hold, stuck=False),
            Fault.STUCK: partial(self._hold, stuck=True),
            Fault.NEVER: lambda *_: None,
            Fault.LOSE_PEER: self._lose,
        }
        return how[fault]

    def _post(self, read: ReadId, peer: Peer, batch: _Batch) -> None:
        self._names[self._inner.read(peer, *batch)] = read

    def _fail(self, read: ReadId, peer: Peer, batch: _Batch) -> None:
        del batch
        self._push(ReadFailed(read, peer.id, TransportError(f"read {read} failed: injected")))

    def _write_half(self, read: ReadId, peer: Peer, batch: _Batch) -> None:
        half = self._inner.read(peer, batch.rows[: len(batch.rows) // 2])
        for completion in poll_until(self._inner, half):
            if isinstance(completion, PeerLost) or completion.read != half:
                self._push(self._renamed(completion))  # of another read: it must not be lost
        self._fail(read, peer, batch)

    def _complete_inline(self, read: ReadId, peer: Peer, batch: _Batch) -> None:
        self._post(read, peer, batch)
        inner = next(key for key, value in self._names.items() if value == read)
        for completion in poll_until(self._inner, inner):
            self._push(self._renamed(completion))

    def _hold(self, read: ReadId, peer: Peer, batch: _Batch, *, stuck: bool) -> None:
        self._held.append(_Held(read, peer, _Batch(*(part.copy() for part in batch)), stuck))

    def _lose(self, read: ReadId, peer: Peer, batch: _Batch) -> None:
        del batch
        reason = PeerLostError(f"peer {peer.id} was lost: injected")
        self._lost.add(peer.id)
        self._end_held(lambda held: held.peer.id == peer.id)
        self._push(ReadFailed(read, peer.id, reason))
        self._push(PeerLost(peer.id, reason))

    def poll(self) -> list[Completion]:
        """Return injected outcomes first, then those of the wrapped transport."""
        with self._lock:
            done = list(self._ready)
            self._ready.clear()
            if done:
                os.eventfd_read(self._fd)
            return done + [self._renamed(completion) for completion in self._inner.poll()]

    def fileno(self) -> int:
        """Readable while injected or real outcomes wait."""
        return self._either.fileno()

    def disconnect(self, peer: Peer) -> None:
        """As the wrapped transport; held reads to the peer end as failed."""
        self._end_held(lambda held: held.peer.id == peer.id)
        self._inner.disconnect(peer)

    def close(self) -> None:
        """As the wrapped transport; held reads end as failed."""
        if not self._closed:
            self._closed = True
            self._end_held(lambda _: True)
            self._inner.close()

    def _end_held(self, which: Callable[[_Held], bool]) -> None:
        for held in [held for held in self._held if which(held) and not held.stuck]:
            self._held.remove(held)
            self._fail(held.read, held.peer, held.batch)

    def _push(self, completion: Completion) -> None:
        self._ready.append(completion)
        os.eventfd_write(self._fd, 1)

    def _renamed(self, completion: Completion) -> Completion:
        if isinstance(completion, PeerLost):
            return completion
        read = self._names.pop(completion.read, completion.read)
        if isinstance(completion, ReadDone):
            c = completion
            return ReadDone(read, c.peer, c.rows, c.rows_posted, c.nbytes)
        return ReadFailed(read, completion.peer, completion.reason)
