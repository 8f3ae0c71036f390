"""Mooncake's transfer engine over tcp as a contender; runs in the interpreter of its own venv."""

from __future__ import annotations

import json
import sys
import time

from kvrdma.bench.patterns import Bytes, Case, rows_of
from kvrdma.bench.rivals.ends import main

BATCH_ROWS = 1024
"""Rows of one call; a call of 16,384 fails here with "queue full"."""


class MooncakeEnd:
    """One transfer engine, peer to peer (no metadata server)."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host

    def open(self, pool: Bytes) -> bytes:
        """Start the engine at this host's address and register the pool."""
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        if self._engine.initialize(self._host, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake's transfer engine did not start")
        self._addr = pool.ctypes.data
        if self._engine.register_memory(self._addr, len(pool)):
            raise RuntimeError(f"Mooncake refused to register {len(pool)} bytes")
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def connect(self, meta: bytes, remote_pool_addr: int) -> None:
        """Remember where the other engine is; Mooncake connects with the first read."""
        self._target, self._remote_addr = meta.decode(), remote_pool_addr

    def load(self, case: Case) -> None:
        """Build the argument lists."""
        rows = rows_of(case, self._addr)
        self._batches = [
            (part[:, 0].tolist(), (part[:, 2] + self._remote_addr).tolist(), part[:, 3].tolist())
            for part in (rows[start : start + BATCH_ROWS] for start in range(0, len(rows), BATCH_ROWS))
        ]

    def read(self) -> float:
        """Read synchronously: Mooncake's batch calls return when the bytes are there."""
        start = time.perf_counter()
        for batch in self._batches:
            status = self._engine.batch_transfer_sync_read(self._target, *batch)
            if status:
                raise RuntimeError(f"Mooncake's read ended with status {status}")
        return time.perf_counter() - start

    def close(self) -> None:
        """Unregister the pool."""
        self._engine.unregister_memory(self._addr)


if __name__ == "__main__":
    main(MooncakeEnd(**json.loads(sys.argv[1])))
