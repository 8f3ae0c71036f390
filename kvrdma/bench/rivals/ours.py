"""kvrdma as a contender, in the same harness as its rivals."""

from __future__ import annotations

import json
import sys
import time
from typing import TypedDict

import msgspec

from kvrdma.bench.patterns import Bytes, Case, rows_of
from kvrdma.bench.rivals.ends import READ_DEADLINE_S, main
from kvrdma.transport import Device, ReadDone, open_transport, poll_until


class _Meta(TypedDict):
    address: bytes
    key: bytes


class KvrdmaEnd:
    """One open transport."""

    def __init__(self, transport: str) -> None:
        self._name = transport

    def open(self, pool: Bytes) -> bytes:
        """Register the pool and give the address and the key."""
        self._transport = open_transport(self._name)
        self._addr = pool.ctypes.data
        region = self._transport.register(self._addr, len(pool), Device())
        return msgspec.msgpack.encode(_Meta(address=self._transport.address(), key=region.key))

    def connect(self, meta: bytes, remote_pool_addr: int) -> None:
        """Connect; the key says where the remote pool is."""
        del remote_pool_addr
        other = msgspec.msgpack.decode(meta, type=_Meta)
        self._peer = self._transport.connect(other["address"], [other["key"]])

    def load(self, case: Case) -> None:
        """Build the rows."""
        self._rows = rows_of(case, self._addr)

    def read(self) -> float:
        """Read; sleep until the completion is there."""
        start = time.perf_counter()
        read = self._transport.read(self._peer, self._rows)
        blocking_s = time.perf_counter() - start
        ended = poll_until(self._transport, read, READ_DEADLINE_S)[-1]
        if not isinstance(ended, ReadDone):
            raise ended.reason
        return blocking_s

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()


if __name__ == "__main__":
    main(KvrdmaEnd(**json.loads(sys.argv[1])))
