"""``UcxTransport``: the contract of ``kvrdma.transport`` over the native core."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, ClassVar

from kvrdma.compiled import why_missing
from kvrdma.errors import (
    BlobError,
    ConfigError,
    ConnectError,
    PeerLostError,
    RegistrationError,
    TransportUnavailableError,
)
from kvrdma.rows import grids_of
from kvrdma.transport import (
    Capabilities,
    Completion,
    Device,
    Peer,
    PeerId,
    ReadId,
    Region,
    RemoteRegion,
    completions_of,
)
from kvrdma_ucx import library, room
from kvrdma_ucx.blobs import UcxAddress, UcxKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrdma.finding import Finding
    from kvrdma.host import HostView
    from kvrdma.rows import Batch, RowTable

_MAX_IN_FLIGHT = 4096


class UcxTransport:
    """Reads memory of other processes and hosts: by UCX's GET where it is one-sided, else by messages.

    One-sided over RDMA and CUDA IPC. Over TCP there is no such thing: the peer's progress thread serves the
    bytes and checks every piece. Its UCX still answers whoever reaches the port: trusted networks only.
    """

    name: ClassVar[str] = "ucx"
    _peer_errors: ClassVar[bool] = True
    """False in tests only: UCX then reads host memory of this host one-sided, but tells nobody of a lost peer."""

    def __init__(
        self, *, require_one_sided: bool = False, max_in_flight: int = 64, connect_timeout_s: float = 5.0
    ) -> None:
        """Load UCX and start the progress thread.

        Args:
            require_one_sided: refuse, when connecting, peers whose CPU would have to serve reads.
            max_in_flight: requests posted to one peer at a time, 1 to 4096.
            connect_timeout_s: how long ``connect`` waits for the peer's first answer.

        Raises:
            ConfigError: an argument is out of range.
            TransportUnavailableError: there is no usable UCX, the process holds two or was forked from one that
                used UCX, or it is short of file descriptors or threads.
        """
        if not 1 <= max_in_flight <= _MAX_IN_FLIGHT:
            raise ConfigError(f"ucx max_in_flight={max_in_flight}: use 1 to {_MAX_IN_FLIGHT}")
        if not 0 < connect_timeout_s <= 600:
            raise ConfigError(f"ucx connect_timeout_s={connect_timeout_s:g}: use more than 0, at most 600")
        room.check_room()
        self._library = library.load()
        try:
            from kvrdma_ucx import _ucx
        except ImportError as error:
            without = "kvrdma was built without UCX: install it anew"
            raise TransportUnavailableError(f"ucx: {why_missing('kvrdma_ucx._ucx', error, without)}") from error
        self._core = _ucx.Transport(
            require_one_sided=require_one_sided, max_in_flight=max_in_flight, peer_errors=self._peer_errors
        )
        self._connect_timeout_s = connect_timeout_s
        # What was given out: numbers alone may be those of another transport.
        self._regions: dict[int, Region] = {}
        self._peers: dict[PeerId, Peer] = {}
        self._version, self._resources, self._cuda, self._probes = self._core.facts()
        self._one_sided_over = [
            resource
            for resource in self._resources
            # Shared memory has no part in endpoints that must report a lost peer.
            if _ucx.is_one_sided(resource.partition("/")[0])
            and not (self._peer_errors and resource.endswith("/memory"))
        ]
        self._max_slots = _ucx.Transport.max_regions
        # Ends the thread before the interpreter takes down what it uses, whoever forgot to close.
        self._finalizer = weakref.finalize(self, self._core.close)

    @staticmethod
    def diagnose(host: HostView) -> list[Finding]:
        """Check UCX and its settings, for `kvrdma doctor`."""
        from kvrdma_ucx import diagnose

        return diagnose.diagnose(host)

    def capabilities(self) -> Capabilities:
        """Say what UCX found here; which of it a peer gets is ``Peer.via``."""
        self._core.address()  # raises if closed
        return Capabilities(
            memory_kinds=frozenset({"cpu", "cuda"} if self._cuda else {"cpu"}),
            reach="network",
            one_sided=bool(self._one_sided_over),
            needs_target_progress=True,
            max_rows=1 << 24,
            details={
                "library": str(self._library.path),
                "chosen by": self._library.source,
                "version": self._version,
                "verbs": "yes" if self._library.has_verbs else "no: can never do RDMA",
                "cuda": "usable" if self._cuda else "not usable here",
                "one-sided over": " ".join(self._one_sided_over) or "nothing",
                "transports": " ".join(self._resources),
                "one-sidedness": "probed" if self._probes else "judged by the lanes UCX chose",
            },
        )

    def register(self, addr: int, nbytes: int, device: Device) -> Region:
        """Register memory; the cookie of the new region is valid before this returns.

        Of CUDA memory: UCX registers the whole allocation it lies in. One transport works with the context of one
        GPU, that of the last registration. Its reads are ordered with no stream: no kernel may still use the
        destination when a read is posted, and kernels launched after ``poll`` has reported it see the bytes. Served
        reads are copied through host memory on the default stream, which waits for the kernels of streams that
        are not non-blocking.
        """
        if not (0 < addr < 1 << 64 and 0 < nbytes < 1 << 64):
            raise RegistrationError(f"ucx cannot register {nbytes} bytes at {addr:#x}")
        number, slot, cookie, rkey = self._core.register(addr, nbytes, _gpu(device))
        instance = self._core.address()[1]
        key = UcxKey(instance, cookie, slot, addr, nbytes, device, rkey)
        region = Region(number, addr, nbytes, device, key.pack())
        self._regions[number] = region
        return region

    def deregister(self, region: Region) -> None:
        """Undo ``register``: readers are told by the region's cookie, which is void from here on."""
        self._core.address()  # raises if closed
        if self._regions.get(region.id) != region:
            raise RegistrationError(f"region {region.id} is not a region of this transport, or was deregistered before")
        self._core.deregister(region.id)
        self._regions.pop(region.id, None)

    def address(self) -> bytes:
        """Give the worker address and the table of cookies, sealed."""
        worker, instance, table_addr, table_rkey = self._core.address()
        return UcxAddress(self._version, instance, table_addr, table_rkey, worker).pack()

    def connect(self, address: bytes, keys: Sequence[bytes]) -> Peer:
        """Connect, check that the peer is the one that wrote ``address``, and read its cookie one-sided."""
        where = UcxAddress.unpack(address)
        self._check_version(where.ucx_version)
        memory = [UcxKey.unpack(key, self._max_slots) for key in keys]
        for index, key in enumerate(memory):
            if key.instance != where.instance:
                raise BlobError(f"key {index} is not from the transport of this address: exchange both together")
        number, one_sided, via = self._core.connect(
            where.worker,
            where.instance,
            where.table_addr,
            where.table_rkey,
            [(key.addr, key.nbytes, key.slot, _gpu(key.device), key.cookie, key.rkey) for key in memory],
            self._connect_timeout_s,
        )
        regions = tuple(RemoteRegion(key.nbytes, key.device) for key in memory)
        peer = Peer(PeerId(number), self.name, regions, one_sided, via)
        self._peers[peer.id] = peer
        return peer

    def read(self, peer: Peer, rows: Batch, then: RowTable | None = None) -> ReadId:
        """Check and copy the rows, hand them to the progress thread, and return."""
        grids, last = grids_of(rows), () if then is None else grids_of(then)
        if self._peers.get(peer.id) is not peer:
            self._core.address()  # raises if closed
            raise PeerLostError(f"peer {peer.id} is not a peer of this transport, or was disconnected: connect first")
        return ReadId(self._core.read(peer.id, grids, last))

    def poll(self) -> list[Completion]:
        """Return what has ended since the last call."""
        return completions_of(self._core.poll())

    def fileno(self) -> int:
        """Give the eventfd that is readable while ``poll`` has something."""
        return self._core.fileno()

    def disconnect(self, peer: Peer) -> None:
        """Close the endpoint by force; its reads end once UCX has given up every request."""
        if self._peers.get(peer.id) is peer:
            self._core.disconnect(peer.id)
            self._peers.pop(peer.id, None)

    def close(self) -> None:
        """Close every endpoint by force and end the progress thread."""
        self._core.close()

    def _check_version(self, theirs: str) -> None:
        # Releases do not understand each other: greeted by 1.22, 1.13 aborts the process that is to be read.
        if theirs.split(".")[:2] != self._version.split(".")[:2]:
            raise ConnectError(
                f"the peer runs UCX {theirs}, this process {self._version} ({self._library.path}): both sides "
                "need the same minor version; point KVRDMA_UCX_LIB to it on one of them"
            )


def _gpu(device: Device) -> int:
    return device.index if device.kind == "cuda" else -1
