"""What an address and a key say: packed here, checked here, so that only sound values reach UCX."""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvrdma.blob import seal, unseal
from kvrdma.errors import BlobError
from kvrdma.transport import Device

ADDRESS_KIND = "ucx/address"
KEY_KIND = "ucx/key"
VERSION = 1

# UCX version, instance, table addr, lengths of table rkey and worker address.
_ADDRESS = struct.Struct("<16s16sQHH")
# Instance, cookie, slot, addr, nbytes, device kind and index, length of rkey.
_KEY = struct.Struct("<16s16sIQQBHH")
_KINDS = ("cpu", "cuda")
_MAX_ADDR = 1 << 64


class UcxAddress(NamedTuple):
    """How to reach a transport, and how to read its table of cookies."""

    ucx_version: str
    instance: bytes
    table_addr: int
    table_rkey: bytes
    worker: bytes

    def pack(self) -> bytes:
        """Seal it for the journey."""
        head = _ADDRESS.pack(
            self.ucx_version.encode("ascii"),
            self.instance,
            self.table_addr,
            len(self.table_rkey),
            len(self.worker),
        )
        return seal(ADDRESS_KIND, VERSION, head + self.table_rkey + self.worker)

    @classmethod
    def unpack(cls, blob: bytes) -> UcxAddress:
        """Open and check a sealed address.

        Raises:
            BlobError: damaged, of another kind, or its lengths do not add up.
        """
        payload = _opened(ADDRESS_KIND, blob, _ADDRESS)
        version, instance, table_addr, rkey_nbytes, worker_nbytes = _ADDRESS.unpack_from(payload)
        rest = payload[_ADDRESS.size :]
        if not rkey_nbytes or not worker_nbytes or len(rest) != rkey_nbytes + worker_nbytes:
            raise BlobError(
                f"{ADDRESS_KIND} blob holds {len(rest)} bytes, not {rkey_nbytes} + {worker_nbytes} as it says"
            )
        text = version.rstrip(b"\0").decode("ascii", "replace")
        return cls(text, instance, table_addr, rest[:rkey_nbytes], rest[rkey_nbytes:])


class UcxKey(NamedTuple):
    """How to read one region."""

    instance: bytes
    """Of the transport that registered the region: a key is of no use with another one's address."""
    cookie: bytes
    slot: int
    addr: int
    nbytes: int
    device: Device
    rkey: bytes

    def pack(self) -> bytes:
        """Seal it for the journey."""
        head = _KEY.pack(
            self.instance,
            self.cookie,
            self.slot,
            self.addr,
            self.nbytes,
            _KINDS.index(self.device.kind),
            self.device.index,
            len(self.rkey),
        )
        return seal(KEY_KIND, VERSION, head + self.rkey)

    @classmethod
    def unpack(cls, blob: bytes, max_slots: int) -> UcxKey:
        """Open and check a sealed key.

        Raises:
            BlobError: damaged, of another kind, or it names something that cannot be.
        """
        payload = _opened(KEY_KIND, blob, _KEY)
        instance, cookie, slot, addr, nbytes, kind, index, rkey_nbytes = _KEY.unpack_from(payload)
        rkey = payload[_KEY.size :]
        if not rkey_nbytes or len(rkey) != rkey_nbytes:
            raise BlobError(f"{KEY_KIND} blob holds {len(rkey)} bytes of rkey where {rkey_nbytes} are needed")
        if kind >= len(_KINDS) or not 0 < slot < max_slots or not nbytes or addr + nbytes > _MAX_ADDR:
            raise BlobError(
                f"{KEY_KIND} blob names device kind {kind}, slot {slot}, {nbytes} bytes at {addr:#x}: forged"
            )
        return cls(instance, cookie, slot, addr, nbytes, Device("cuda" if kind else "cpu", index), rkey)


def _opened(kind: str, blob: bytes, form: struct.Struct) -> bytes:
    payload = unseal(kind, VERSION, blob)
    if len(payload) < form.size:
        raise BlobError(f"{kind} blob holds {len(payload)} bytes where at least {form.size} are needed")
    return payload
