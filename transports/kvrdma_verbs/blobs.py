"""What an address and a key say: packed here, checked here, so that only sound values reach the NIC."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from kvrdma.blob import seal, unseal
from kvrdma.errors import BlobError
from kvrdma.transport import Device
from kvrdma_verbs.devices import MAX_PORTS, PeerPort

ADDRESS_KIND = "verbs/address"
KEY_KIND = "verbs/key"
VERSION = 1

Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Key32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Bytes16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Keys = Annotated[tuple[Key32, ...], msgspec.Meta(min_length=1, max_length=MAX_PORTS)]


class WirePort(msgspec.Struct, frozen=True, array_like=True):
    """One port of the one who made an address."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    gid: Bytes16
    ethernet: bool

    def port(self) -> PeerPort:
        """As the rules of ``devices`` take it."""
        return PeerPort(self.name, self.gid, self.ethernet)


class VerbsAddress(msgspec.Struct, frozen=True, array_like=True):
    """How to reach a transport, and how to read its table of cookies."""

    instance: Bytes16
    boot: Annotated[str, msgspec.Meta(max_length=64)]
    """Boot id and network namespace: whoever shares them connects by loopback."""
    hosts: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    table_addr: Word
    table_rkeys: Keys
    ports: Annotated[tuple[WirePort, ...], msgspec.Meta(min_length=1, max_length=MAX_PORTS)]

    def pack(self) -> bytes:
        """Seal it for the journey."""
        return seal(ADDRESS_KIND, VERSION, msgspec.msgpack.encode(self))

    @classmethod
    def unpack(cls, blob: bytes) -> VerbsAddress:
        """Open and check a sealed address.

        Raises:
            BlobError: damaged, of another kind, or it names what cannot be.
        """
        found = _decode(ADDRESS_KIND, blob, cls)
        if len(found.table_rkeys) != len(found.ports):
            raise BlobError(
                f"{ADDRESS_KIND} blob: {len(found.ports)} ports, {len(found.table_rkeys)} keys of the table"
            )
        return found


class VerbsKey(msgspec.Struct, frozen=True, array_like=True):
    """How to read one region."""

    instance: Bytes16
    """Of the transport that registered the region: a key is of no use with another one's address."""
    cookie: Bytes16
    slot: Annotated[int, msgspec.Meta(ge=1, lt=1 << 20)]
    addr: Word
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    gpu: Annotated[int, msgspec.Meta(ge=-1, le=1024)]
    rkeys: Keys

    @property
    def device(self) -> Device:
        """Where the region lies."""
        return Device() if self.gpu < 0 else Device("cuda", self.gpu)

    def pack(self) -> bytes:
        """Seal it for the journey."""
        return seal(KEY_KIND, VERSION, msgspec.msgpack.encode(self))

    @classmethod
    def unpack(cls, blob: bytes, max_slots: int) -> VerbsKey:
        """Open and check a sealed key.

        Raises:
            BlobError: damaged, of another kind, or it names what cannot be.
        """
        found = _decode(KEY_KIND, blob, cls)
        if found.slot >= max_slots or found.addr + found.nbytes > 1 << 63:
            raise BlobError(f"{KEY_KIND} blob names slot {found.slot}, {found.nbytes} bytes at {found.addr:#x}: forged")
        return found


T = TypeVar("T", VerbsAddress, VerbsKey)


def _decode(kind: str, blob: bytes, of: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(unseal(kind, VERSION, blob), type=of)
    except msgspec.MsgspecError as error:
        raise BlobError(f"{kind} blob is malformed: {error}") from None
