"""``CmaTransport``: the contract of ``kvrdma.transport`` over the native core."""

from __future__ import annotations

import os
import struct
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvrdma.blob import seal, unseal
from kvrdma.compiled import why_missing
from kvrdma.errors import (
    BlobError,
    ConfigError,
    PeerIdentityError,
    PeerLostError,
    PeerPermissionError,
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
from kvrdma_cma import denied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvrdma.finding import Finding
    from kvrdma.host import HostView
    from kvrdma.rows import Batch, RowTable

_ADDRESS = struct.Struct("<16sQiQQ16s")
_KEY = struct.Struct("<16sQQQ16s")


class _Address(NamedTuple):
    boot_id: bytes
    pid_namespace: int
    pid: int
    start_time: int
    cookie_addr: int
    cookie: bytes


class _Key(NamedTuple):
    owner: bytes
    """Cookie of the transport that registered the region."""
    addr: int
    nbytes: int
    cookie_addr: int
    cookie: bytes


_MAX_THREADS = 4


class CmaTransport:
    """One-sided reads of host memory between processes of one host; the peer's CPU is not needed."""

    name: ClassVar[str] = "cma"

    def __init__(self, *, require_one_sided: bool = False, threads: int | None = None) -> None:
        """Open and start the threads that copy.

        Args:
            require_one_sided: always holds here.
            threads: how many copy; by default as many as there are processors, at most 4.

        Raises:
            ConfigError: fewer than 1 or more than 64 threads.
            TransportUnavailableError: the native module was not built for this machine.
            OSError: there is no /proc.
        """
        del require_one_sided
        count = min(_MAX_THREADS, len(os.sched_getaffinity(0))) if threads is None else threads
        if not 1 <= count <= 64:
            raise ConfigError(f"cma threads={count}: use 1 to 64")
        denied.pid_namespace()  # needed for every address: without /proc nothing here works
        try:
            from kvrdma_cma._cma import Core
        except ImportError as error:
            without = "kvrdma's installation is not whole: install it anew"
            raise TransportUnavailableError(f"cma: {why_missing('kvrdma_cma._cma', error, without)}") from error
        self._core = Core(count)
        weakref.finalize(self, self._core.close)
        self._regions: dict[int, Region] = {}
        self._peers: dict[PeerId, Peer] = {}
        self._threads = count

    @staticmethod
    def diagnose(host: HostView) -> list[Finding]:
        """Check what the kernel allows, for `kvrdma doctor`."""
        from kvrdma_cma import diagnose

        return diagnose.diagnose(host)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            memory_kinds=frozenset({"cpu"}),
            reach="host",
            one_sided=True,
            needs_target_progress=False,
            max_rows=1 << 31,
            details={"mechanism": "process_vm_readv", "threads": str(self._threads)},
        )

    def register(self, addr: int, nbytes: int, device: Device) -> Region:
        if device.kind != "cpu":
            raise RegistrationError(f"cma reads host memory only, not {device}: use a transport for {device.kind}")
        if not (0 < addr < 1 << 64 and 0 < nbytes < 1 << 64):
            raise RegistrationError(f"cma cannot register {nbytes} bytes at {addr:#x}")
        number, cookie_addr, cookie = self._core.add_region(addr, nbytes)
        key = _Key(self._core.identity()[3], addr, nbytes, cookie_addr, cookie)
        region = Region(number, addr, nbytes, device, seal("cma/key", 1, _KEY.pack(*key)))
        self._regions[number] = region
        return region

    def deregister(self, region: Region) -> None:
        self._core.check_open()
        if self._regions.get(region.id) != region:
            raise RegistrationError(f"region {region.id} is not registered with this transport")
        self._core.remove_region(region.id)
        del self._regions[region.id]

    def address(self) -> bytes:
        self._core.check_open()
        identity = self._core.identity()
        where = _Address(denied.boot_id(), denied.pid_namespace(), *identity)
        return seal("cma/address", 1, _ADDRESS.pack(*where))

    def connect(self, address: bytes, keys: Sequence[bytes]) -> Peer:
        where = _Address._make(_unpack("cma/address", _ADDRESS, address))
        memory = [_Key._make(_unpack("cma/key", _KEY, key)) for key in keys]
        for index, key in enumerate(memory):
            if key.owner != where.cookie:
                raise BlobError(f"key {index} is not from the process of this address: exchange both together")
        _check_same_host(where)
        identity = (where.pid, where.start_time, where.cookie_addr, where.cookie)
        try:
            number = self._core.connect(*identity, [key[1:] for key in memory])
        except PeerPermissionError as error:
            raise PeerPermissionError(f"{error}: {denied.explain(where.pid)}", code=error.code) from None
        regions = tuple(RemoteRegion(key.nbytes, Device()) for key in memory)
        peer = Peer(PeerId(number), self.name, regions, one_sided=True, via="process_vm_readv")
        self._peers[peer.id] = peer
        return peer

    def read(self, peer: Peer, rows: Batch, then: RowTable | None = None) -> ReadId:
        grids, last = grids_of(rows), () if then is None else grids_of(then)
        if self._peers.get(peer.id) is not peer:
            self._core.check_open()
            raise PeerLostError(f"peer {peer.id} is not connected to this transport (any more): connect again")
        return ReadId(self._core.read(peer.id, grids, last))

    def poll(self) -> list[Completion]:
        return completions_of(self._core.poll())

    def fileno(self) -> int:
        return self._core.fileno()

    def disconnect(self, peer: Peer) -> None:
        if self._peers.get(peer.id) is peer:
            self._core.disconnect(peer.id)
            self._peers.pop(peer.id, None)

    def close(self) -> None:
        self._core.close()


def _check_same_host(peer: _Address) -> None:
    if peer.boot_id != denied.boot_id():
        raise PeerIdentityError(
            f"process {peer.pid} runs on another host, or this host was booted since: its boot id is "
            f"{peer.boot_id.hex()}, ours {denied.boot_id().hex()}; use a network transport, or ask the peer for a "
            "new address"
        )
    if peer.pid_namespace != denied.pid_namespace():
        raise PeerPermissionError(
            f"process {peer.pid} is in PID namespace {peer.pid_namespace}, this one in {denied.pid_namespace()}: "
            "share it (docker --pid, Kubernetes shareProcessNamespace or hostPID), or use a network transport"
        )


def _unpack(kind: str, form: struct.Struct, blob: bytes) -> tuple[Any, ...]:
    payload = unseal(kind, 1, blob)
    if len(payload) != form.size:
        raise BlobError(f"{kind} blob holds {len(payload)} bytes where {form.size} are needed")
    return form.unpack(payload)
