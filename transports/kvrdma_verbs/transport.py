"""``VerbsTransport``: the contract of ``kvrdma.transport`` over the native core."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvrdma.compiled import why_missing
from kvrdma.errors import BlobError, ConfigError, PeerLostError, RegistrationError, TransportUnavailableError
from kvrdma.finding import Finding, green
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
from kvrdma_verbs.blobs import VerbsAddress, VerbsKey, WirePort
from kvrdma_verbs.devices import choose_lanes, find_ports, own_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrdma.host import HostView
    from kvrdma.rows import Batch, RowTable

_MAX_QUEUES = 8
"""Per lane; eight lanes of them are what one greeting may hold."""


class VerbsTransport:
    """RDMA READ over InfiniBand and RoCE, on reliable-connected queue pairs of its own.

    Queue pairs are joined over TCP; that connection stays, so that the end of a peer's process is noticed at once.
    Whoever can reach the port and has the address blob may read what is registered: trusted networks only.
    """

    name: ClassVar[str] = "verbs"

    def __init__(
        self,
        *,
        require_one_sided: bool = False,
        queues_per_lane: int = 4,
        busy_poll_us: int = 0,
        connect_timeout_s: float = 5.0,
    ) -> None:
        """Open the NICs and start the thread.

        Args:
            require_one_sided: always holds here.
            queues_per_lane: queue pairs between two ports, 1 to 8: the NIC limits the reads outstanding on each.
            busy_poll_us: how long the thread spins after something has happened before it sleeps, microseconds.
            connect_timeout_s: how long ``connect`` may take.

        Raises:
            ConfigError: an argument or a ``KVRDMA_VERBS_*`` variable is out of range.
            TransportUnavailableError: no libibverbs, no active port, or it may not be used; says why.
        """
        del require_one_sided
        if not 1 <= queues_per_lane <= _MAX_QUEUES:
            raise ConfigError(f"verbs queues_per_lane={queues_per_lane}: use 1 to {_MAX_QUEUES}")
        if not 0 <= busy_poll_us <= 1_000_000:
            raise ConfigError(f"verbs busy_poll_us={busy_poll_us}: use 0 to 1000000")
        if not 0 < connect_timeout_s <= 600:
            raise ConfigError(f"verbs connect_timeout_s={connect_timeout_s:g}: use more than 0, at most 600")
        try:
            from kvrdma_verbs import _verbs
        except ImportError as error:
            without = "kvrdma was built without libibverbs' headers: install libibverbs-dev, then kvrdma anew"
            raise TransportUnavailableError(f"verbs: {why_missing('kvrdma_verbs._verbs', error, without)}") from error
        self._ports = find_ports()
        self._core = _verbs.Transport(
            [(port.device, port.number, port.gid_index) for port in self._ports],
            queues_per_lane=queues_per_lane,
            busy_poll_us=busy_poll_us,
        )
        self._max_slots = _verbs.Transport.max_regions
        self._connect_timeout_s = connect_timeout_s
        self._cuda = Path("/proc/driver/nvidia/version").exists()
        self._regions: dict[int, Region] = {}
        self._peers: dict[PeerId, Peer] = {}
        self._finalizer = weakref.finalize(self, self._core.close)

    @staticmethod
    def diagnose(host: HostView) -> list[Finding]:
        """Tell a host without any RDMA device, which is no fault, from one whose devices do not open."""
        if host.entries(host.sys / "class/infiniband"):
            return []
        said = "no RDMA device on this host, so not usable; nothing to do, unless the host is meant to have one"
        return [green("transport verbs", said)]

    def capabilities(self) -> Capabilities:
        """Say which ports are used."""
        self._core.address()  # raises if closed
        return Capabilities(
            memory_kinds=frozenset({"cpu", "cuda"} if self._cuda else {"cpu"}),
            reach="network",
            one_sided=True,
            needs_target_progress=False,
            max_rows=1 << 24,
            details={
                "mechanism": "RDMA READ, reliable connected",
                "ports": " ".join(f"{port.name} ({port.gbps:g} Gbit/s)" for port in self._ports),
                "GIDs": " ".join(
                    f"{port.name}[{port.gid_index}]={port.host or port.gid.hex()}" for port in self._ports
                ),
            },
        )

    def register(self, addr: int, nbytes: int, device: Device) -> Region:
        """Pin memory and register it with every port's NIC."""
        if not (0 < addr < 1 << 63 and 0 < nbytes < 1 << 63):
            raise RegistrationError(f"verbs cannot register {nbytes} bytes at {addr:#x}")
        gpu = device.index if device.kind == "cuda" else -1
        number, slot, cookie, rkeys = self._core.register(addr, nbytes, gpu)
        key = VerbsKey(self._core.address()[0], cookie, slot, addr, nbytes, gpu, tuple(rkeys))
        region = Region(number, addr, nbytes, device, key.pack())
        self._regions[number] = region
        return region

    def deregister(self, region: Region) -> None:
        """Undo ``register``; readers are told by the NIC or by the region's cookie."""
        self._core.address()  # raises if closed
        if self._regions.get(region.id) != region:
            raise RegistrationError(f"region {region.id} is not a region of this transport, or was deregistered before")
        self._core.deregister(region.id)
        self._regions.pop(region.id, None)

    def address(self) -> bytes:
        """Give ports, GIDs and where to join queue pairs, sealed."""
        instance, port, table_addr, table_rkeys, _ = self._core.address()
        hosts = tuple(own_hosts(self._ports))
        ports = tuple(WirePort(each.name, each.gid, each.ethernet) for each in self._ports)
        return VerbsAddress(instance, _here(), hosts, port, table_addr, tuple(table_rkeys), ports).pack()

    def connect(self, address: bytes, keys: Sequence[bytes]) -> Peer:
        """Join queue pairs with the process that wrote ``address``, and read its cookie as a proof."""
        where = VerbsAddress.unpack(address)
        memory = [VerbsKey.unpack(key, self._max_slots) for key in keys]
        for index, key in enumerate(memory):
            if key.instance != where.instance:
                raise BlobError(f"key {index} is not from the transport of this address: exchange both together")
            if len(key.rkeys) != len(where.ports):
                raise BlobError(f"key {index} is for {len(key.rkeys)} ports, the address has {len(where.ports)}")
        self._core.address()  # raises if closed
        lanes = choose_lanes(self._ports, [port.port() for port in where.ports])
        number, via = self._core.connect(
            (["127.0.0.1"] if where.boot == _here() else []) + list(where.hosts),
            where.port,
            where.instance,
            where.table_addr,
            list(where.table_rkeys),
            [(key.addr, key.nbytes, key.slot, key.cookie, list(key.rkeys)) for key in memory],
            lanes,
            self._connect_timeout_s,
        )
        regions = tuple(RemoteRegion(key.nbytes, key.device) for key in memory)
        peer = Peer(PeerId(number), self.name, regions, one_sided=True, via=via)
        self._peers[peer.id] = peer
        return peer

    def read(self, peer: Peer, rows: Batch, then: RowTable | None = None) -> ReadId:
        """Check and copy the rows, hand them to the thread that posts, and return."""
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
        """Destroy the queue pairs; nothing is written for its reads from then on."""
        if self._peers.get(peer.id) is peer:
            self._core.disconnect(peer.id)
            self._peers.pop(peer.id, None)

    def close(self) -> None:
        """Destroy every queue pair and end the thread."""
        self._core.close()


def _here() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
