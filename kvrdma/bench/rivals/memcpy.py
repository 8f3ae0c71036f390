"""The yardstick as a contender: a copy within the reader's own process."""

from __future__ import annotations

import time

import numpy as np

from kvrdma.bench.memcpy import memcpy_of
from kvrdma.bench.patterns import Bytes, Case
from kvrdma.bench.rivals.ends import main


class MemcpyEnd:
    """One thread, two buffers."""

    def open(self, pool: Bytes) -> bytes:
        """Allocate a target and touch it."""
        self._pool = pool
        self._target = np.full(len(pool), 1, np.uint8)
        return b""

    def connect(self, meta: bytes, remote_pool_addr: int) -> None:
        """Nothing to reach."""

    def load(self, case: Case) -> None:
        """Prepare the copy."""
        self._copy = memcpy_of(case, self._pool, self._target)

    def read(self) -> float:
        """Copy; the caller is held all the time."""
        start = time.perf_counter()
        self._copy()
        return time.perf_counter() - start

    def close(self) -> None:
        """Nothing to release."""


if __name__ == "__main__":
    main(MemcpyEnd())
