"""The reference transport: both ends live in one process, and a read is a memmove.

Read this file first when you write a transport; it keeps every promise of ``kvrdma.transport`` and does
nothing else. A read is posted by ``read`` and carried out by ``poll``, so that there is a time in between, as
with real hardware.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvrdma.blob import seal, unseal
from kvrdma.errors import (
    BlobError,
    ConnectError,
    PeerLostError,
    ReadCancelledError,
    RegionBusyError,
    RegistrationError,
    StaleRegionError,
    TransportClosedError,
    TransportError,
)
from kvrdma.rows import as_rows, check_rows, merge_rows
from kvrdma.transport import (
    Capabilities,
    Completion,
    Device,
    Peer,
    PeerId,
    PeerLost,
    ReadDone,
    ReadFailed,
    ReadId,
    Region,
    RemoteRegion,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrdma.rows import Batch, Rows, RowTable

# The network of this transport: who can be reached by which address. A dropped transport leaves it by itself.
_network: weakref.WeakValueDictionary[bytes, MemoryTransport] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class _Post:
    """A read that ``poll`` has not carried out yet."""

    read: ReadId
    peer: Peer
    rows: Rows
    """Merged."""
    then: Rows
    count: int
    """Of the rows that were handed over."""

    @property
    def all_rows(self) -> list[list[int]]:
        """In the order in which they are read."""
        return [*self.rows.tolist(), *self.then.tolist()]


class MemoryTransport:
    """Moves bytes between regions of this process."""

    name: ClassVar[str] = "memory"

    def __init__(self, *, require_one_sided: bool = False) -> None:
        """Open; ``require_one_sided`` always holds here."""
        del require_one_sided
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._token = secrets.token_bytes(16)
        self._ids = itertools.count(1)
        self._regions: dict[int, Region] = {}
        self._remote: dict[PeerId, tuple[Peer, MemoryTransport, list[int]]] = {}
        self._lost: set[PeerId] = set()
        self._posted: deque[_Post] = deque()
        self._completions: deque[Completion] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        weakref.finalize(self, os.close, self._fd).atexit = False  # threads that still run would meet another file
        _network[self._token] = self

    def capabilities(self) -> Capabilities:
        return Capabilities(
            frozenset({"cpu"}), "process", one_sided=True, needs_target_progress=False, max_rows=1 << 31
        )

    def register(self, addr: int, nbytes: int, device: Device) -> Region:
        if device.kind != "cpu" or nbytes < 1 or addr < 1 or addr + nbytes > 1 << 64:
            raise RegistrationError(f"{self.name} cannot register {nbytes} bytes at {addr:#x} on {device}")
        with self._lock:
            self._check_open()
            number = next(self._ids)
            key = seal("memory/key", 1, self._token + number.to_bytes(8, "little") + nbytes.to_bytes(8, "little"))
            region = self._regions[number] = Region(number, addr, nbytes, device, key)
            return region

    def deregister(self, region: Region) -> None:
        with self._lock:
            self._check_open()
            if self._regions.get(region.id) != region:
                raise RegistrationError(f"region {region.id} is not registered with this transport")
            for post in self._posted:
                if any(
                    addr < region.addr + region.nbytes and region.addr < addr + length
                    for addr, _, _, length in post.all_rows  # merged rows may span regions that touch
                ):
                    raise RegionBusyError(
                        f"region {region.id} is the destination of read {post.read}: poll until it ends"
                    )
            del self._regions[region.id]

    def address(self) -> bytes:
        self._check_open()
        return seal("memory/address", 1, self._token)

    def connect(self, address: bytes, keys: Sequence[bytes]) -> Peer:
        token = unseal("memory/address", 1, address)
        payloads = [unseal("memory/key", 1, key) for key in keys]
        if any(payload[:16] != token for payload in payloads):
            raise BlobError("a key is not from the process of this address: exchange both together")
        remote = _network.get(token)
        if remote is None:
            raise ConnectError("no open memory transport of this process has that address")
        numbers = [int.from_bytes(payload[16:24], "little") for payload in payloads]
        regions = tuple(RemoteRegion(int.from_bytes(payload[24:], "little"), Device()) for payload in payloads)
        with self._lock:
            self._check_open()
            peer = Peer(PeerId(next(self._ids)), self.name, regions, one_sided=True, via="memmove")
            self._remote[peer.id] = (peer, remote, numbers)
            return peer

    def read(self, peer: Peer, rows: Batch, then: RowTable | None = None) -> ReadId:
        rows, last = as_rows(rows), as_rows([] if then is None else then)
        with self._lock:
            self._check_open()
            if peer.id not in self._remote or self._remote[peer.id][0] is not peer or peer.id in self._lost:
                raise PeerLostError(f"peer {peer.id} was lost or disconnected here, or never connected: connect again")
            local = [(region.addr, region.nbytes) for region in self._regions.values()]
            check_rows(np.concatenate([rows, last]), local, [region.nbytes for region in peer.regions])
            read = ReadId(next(self._ids))
            self._posted.append(_Post(read, peer, merge_rows(rows), last.copy(), len(rows)))
            os.eventfd_write(self._fd, 1)
            return read

    def poll(self) -> list[Completion]:
        self._check_process()
        with self._lock:
            while self._posted:
                self._carry_out(self._posted.popleft())
            done = list(self._completions)
            self._completions.clear()
            if done:
                os.eventfd_read(self._fd)
            return done

    def fileno(self) -> int:
        return self._fd

    def disconnect(self, peer: Peer) -> None:
        with self._lock:
            if peer.id in self._remote and self._remote[peer.id][0] is peer:
                self._cancel([post for post in self._posted if post.peer is peer], f"peer {peer.id} was disconnected")
                del self._remote[peer.id]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._cancel(list(self._posted), "the transport was closed")
            self._remote.clear()
            self._regions.clear()
            _network.pop(self._token, None)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # the descriptor is shared with the parent, the memory is not
            raise TransportClosedError(f"{self.name} transport does not survive fork: open it afterwards, or spawn")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise TransportClosedError(f"{self.name} transport is closed")

    def _carry_out(self, post: _Post) -> None:
        peer, rows = post.peer, post.all_rows
        _, remote, numbers = self._remote[peer.id]
        sources = [remote._regions.get(number) for number in numbers]  # noqa: SLF001 - the other end of the wire
        named = {index for _, index, _, _ in rows}
        error = _error(remote, sources, [sources[index] for index in named], peer)
        if error is None:
            base = {index: region.addr for index, region in enumerate(sources) if region is not None}
            for addr, index, offset, length in rows:
                ctypes.memmove(addr, base[index] + offset, length)
            # The bytes count only if their registration held until they had all been read.
            now = [remote._regions.get(number) for number in numbers]  # noqa: SLF001
            error = _error(remote, sources, [now[index] for index in named], peer)
        if isinstance(error, PeerLostError):
            self._lose(post.read, peer, error)
        elif error is not None:
            self._completions.append(ReadFailed(post.read, peer.id, error))
        else:
            nbytes = int(post.rows[:, 3].sum())
            self._completions.append(ReadDone(post.read, peer.id, post.count, len(post.rows), nbytes))

    def _lose(self, read: ReadId, peer: Peer, reason: TransportError) -> None:
        self._completions.append(ReadFailed(read, peer.id, reason))
        for post in [post for post in self._posted if post.peer is peer]:
            self._posted.remove(post)
            self._completions.append(ReadFailed(post.read, peer.id, reason))
        if peer.id not in self._lost:
            self._lost.add(peer.id)
            self._completions.append(PeerLost(peer.id, reason))

    def _cancel(self, posts: list[_Post], why: str) -> None:
        for post in posts:
            self._posted.remove(post)
            reason = ReadCancelledError(f"read {post.read}: {why}")
            self._completions.append(ReadFailed(post.read, post.peer.id, reason))


def _error(
    remote: MemoryTransport, sources: list[Region | None], now: list[Region | None], peer: Peer
) -> TransportError | None:
    """Say why the peer's regions cannot be read (any more)."""
    if remote._closed:  # noqa: SLF001
        return PeerLostError(f"peer {peer.id} closed its transport")
    if any(region is None or region not in sources for region in now):
        return StaleRegionError(f"peer {peer.id} deregistered a region that is being read")
    return None
