"""The contract between whoever needs remote bytes and whoever can fetch them.

A transport moves bytes between registered regions, one-sided, and knows nothing of KV caches. It has three
duties. It checks both ends of every row before anything is posted. It reports every outcome in ``poll`` and
nowhere else, exactly once. And until it has reported a read as done or failed, that read may still write: its
destination belongs to nobody else. ``kvrdma_memory`` is the reference to read; ``kvrdma.testing`` exports the
suite that every implementation passes.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar, Literal, NewType, Protocol, TypeAlias, cast

import msgspec

from kvrdma import errors
from kvrdma.errors import ConfigError, TransportError, TransportUnavailableError
from kvrdma.rows import Batch, RowTable

ENTRY_POINT_GROUP = "kvrdma.transports"

ReadId = NewType("ReadId", int)
PeerId = NewType("PeerId", int)


@dataclass(frozen=True, slots=True)
class Device:
    """Where memory lies: the host, or one GPU."""

    kind: Literal["cpu", "cuda"] = "cpu"
    index: int = 0

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

        Raises:
            ConfigError: anything else.
        """
        kind, _, index = text.partition(":")
        if text == "cpu" or (kind == "cuda" and (text == "cuda" or index.isdecimal())):
            return cls(cast("Literal['cpu', 'cuda']", kind), int(index or 0))
        raise ConfigError(f"device {text!r} is unknown: use cpu, cuda or cuda:N")

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do on this machine with its settings."""

    memory_kinds: frozenset[str]
    """Device kinds it can register: ``"cpu"``, ``"cuda"``."""
    reach: Literal["process", "host", "network"]
    """How far away a peer may be."""
    one_sided: bool
    """Whether reads can be one-sided here at all; what a given peer got is ``Peer.one_sided``."""
    needs_target_progress: bool
    """Whether an emulated read needs the target's transport to run (it then has a thread for that)."""
    max_rows: int
    """Most rows in one ``read``."""
    details: Mapping[str, str] = field(default_factory=dict)
    """For people: library path, version, features, devices."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory registered with one transport of this process."""

    id: int
    addr: int
    nbytes: int
    device: Device
    key: bytes
    """What a peer passes to ``connect`` to read this region: a sealed blob."""


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """Memory of a peer, as its key describes it; rows name it by its index in ``Peer.regions``."""

    nbytes: int
    device: Device


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected peer and how its memory is read."""

    id: PeerId
    transport: str
    regions: tuple[RemoteRegion, ...]
    one_sided: bool
    """False: the peer's CPU serves the reads (software emulation)."""
    via: str
    """For people: the mechanism and device, e.g. ``"process_vm_readv"`` or ``"rc_mlx5/mlx5_0:1"``."""


class ReadDone(msgspec.Struct, frozen=True):
    """Every byte of the read lies in local memory."""

    read: ReadId
    peer: PeerId
    rows: int
    """Rows handed over."""
    rows_posted: int
    """Rows after merging those adjacent on both sides and dropping empty ones."""
    nbytes: int


class ReadFailed(msgspec.Struct, frozen=True):
    """The read ended without its bytes; nothing of it will be written any more."""

    read: ReadId
    peer: PeerId
    reason: TransportError


class PeerLost(msgspec.Struct, frozen=True):
    """The peer is gone. Each of its reads in flight also ends, with its own ``ReadFailed``, before this."""

    peer: PeerId
    reason: TransportError


Completion: TypeAlias = ReadDone | ReadFailed | PeerLost


class Transport(Protocol):
    """What a transport implements. Every method may be called from any thread and none waits for a peer.

    (``connect`` alone may take as long as the peer's first answer, bounded by the transport's own deadline.)
    After ``close`` every method but ``poll``, ``fileno`` and ``close`` raises ``TransportClosedError``.
    """

    name: ClassVar[str]

    def capabilities(self) -> Capabilities:
        """Say what this transport can do here."""
        ...

    def register(self, addr: int, nbytes: int, device: Device) -> Region:
        """Make ``[addr, addr + nbytes)`` readable by peers and usable as a destination.

        The caller keeps the memory alive until ``deregister`` or ``close``, and until peers have stopped
        reading it.

        Raises:
            RegistrationError: not memory of this process, a device kind not supported, or ``nbytes`` 0.
        """
        ...

    def deregister(self, region: Region) -> None:
        """Undo ``register``; peers that still read the region get an error, where the transport can tell.

        Raises:
            RegionBusyError: a read of this process into the region has not ended.
            RegistrationError: not a region of this transport, or deregistered before.
        """
        ...

    def address(self) -> bytes:
        """Give the blob by which peers reach this process."""
        ...

    def connect(self, address: bytes, keys: Sequence[bytes]) -> Peer:
        """Reach the process that made ``address`` and make its regions ``keys`` readable, in that order.

        Raises:
            BlobError: an address or key is damaged or foreign; the peer is not contacted.
            ConnectError: nobody is there, it is another process, or it may not be read.
        """
        ...

    def read(self, peer: Peer, rows: Batch, then: RowTable | None = None) -> ReadId:
        """Post a batch and return; the arrays may be reused at once.

        Destinations of one batch must not overlap each other.

        Args:
            peer: from ``connect``.
            rows: C-contiguous ``(N, 4)`` uint64, or ``RowGrids`` that stand for as many, see ``kvrdma.rows``; N may
                be 0, lengths may be 0.
            then: a few rows that are read when every byte of ``rows`` has arrived and not before, so that they tell
                how things stood after the rest had been read. They belong to the same read, which ends once; its
                ``ReadDone`` does not count them.

        Raises:
            RowsError: a row is out of bounds; nothing was posted. The first of ``then`` is row N.
            PeerLostError: the peer was lost or disconnected before.
        """
        ...

    def poll(self) -> list[Completion]:
        """Return what has ended since the last call, in order; empty when nothing has."""
        ...

    def fileno(self) -> int:
        """Give a file descriptor, readable while ``poll`` has something to return; valid until close."""
        ...

    def disconnect(self, peer: Peer) -> None:
        """Forget the peer. Reads in flight end as failed once they can no longer write. Idempotent."""
        ...

    def close(self) -> None:
        """End everything within 5 s, whatever peers do. Idempotent.

        Reads in flight end as failed; the caller may still ``poll`` for them.
        """
        ...


def wait(transports: Iterable[Transport], timeout_s: float) -> bool:
    """Block until one of the transports has something to poll, or until the time is over.

    Returns:
        True if there is something to poll.
    """
    poller = select.poll()
    for transport in transports:
        poller.register(transport.fileno(), select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1e3))


def poll_until(transport: Transport, read: ReadId, timeout_s: float = 60.0) -> list[Completion]:
    """Poll until ``read`` has ended and return everything that ended meanwhile, that read last.

    Raises:
        ReadTimeoutError: it did not end in time; it is still in flight.
    """
    deadline = time.monotonic() + timeout_s
    seen: list[Completion] = []
    while True:
        seen += transport.poll()
        if any(not isinstance(done, PeerLost) and done.read == read for done in seen):
            return sorted(seen, key=lambda done: not isinstance(done, PeerLost) and done.read == read)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise errors.ReadTimeoutError(f"read {read} did not end within {timeout_s:g} s; it may still write")
        wait([transport], left_s)


def completions_of(events: Iterable[tuple[str, int, int, int, int, int, str, int]]) -> list[Completion]:
    """Build completions from native events.

    Args:
        events: of each (error class name or ``""``, read id or 0 for a lost peer, peer id, rows, rows posted, bytes,
            message, native status).
    """
    completions: list[Completion] = []
    for error, read, peer, rows, rows_posted, nbytes, message, code in events:
        if not error:
            completions.append(ReadDone(read, peer, rows, rows_posted, nbytes))  # type: ignore[arg-type] # ids
            continue
        reason: TransportError = getattr(errors, error)(message, code=code)
        completions.append(ReadFailed(ReadId(read), PeerId(peer), reason) if read else PeerLost(PeerId(peer), reason))
    return completions


def installed_transports() -> dict[str, EntryPoint]:
    """List the transports installed in this environment, by name; none of them is loaded."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def open_transport(name: str, **options: object) -> Transport:
    """Load the transport ``name`` and open it.

    Args:
        name: as in ``installed_transports()``.
        options: keyword arguments of that transport, e.g. ``require_one_sided=True``, which every transport
            takes: refuse peers that would have to emulate reads.

    Raises:
        TransportUnavailableError: not installed, or it cannot run here; says what to install or set.
    """
    points = installed_transports()
    if name not in points:
        raise TransportUnavailableError(
            f"transport {name!r} is not installed; installed: {', '.join(sorted(points)) or 'none'}"
        )
    try:
        factory = points[name].load()
    except ImportError as error:
        raise TransportUnavailableError(
            f"transport {name!r} ({points[name].value}) cannot be loaded: {error}; reinstall kvrdma"
        ) from error
    try:
        return cast("Transport", factory(**options))
    except OSError as error:  # a kernel interface that is missing, or descriptors that have run out
        raise TransportUnavailableError(
            f"transport {name!r} cannot be opened here: {error}", code=error.errno
        ) from error
