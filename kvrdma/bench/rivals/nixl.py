"""NIXL as a contender; runs in the interpreter of NIXL's own venv.

Used as vLLM's NixlConnector does: descriptor lists of the whole pools are prepared once, a transfer picks
from them by index. Neither that nor making the transfer is timed, only posting it and waiting for it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from kvrdma.bench.patterns import Bytes, Case, Shape, block_ids
from kvrdma.bench.rivals.ends import READ_DEADLINE_S, main


class NixlEnd:
    """One NIXL agent with the UCX backend."""

    def __init__(self, *, progress_thread: bool) -> None:
        self._progress_thread = progress_thread
        self._case: Any = None
        self._handle: Any = None

    def open(self, pool: Bytes) -> bytes:
        """Register the pool and give the agent's metadata."""
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=self._progress_thread, backends=["UCX"])
        self._agent = nixl_agent(f"kvrdma-bench-{time.monotonic_ns()}", config)
        self._addr, self._nbytes = pool.ctypes.data, len(pool)
        self._agent.register_memory([(self._addr, self._nbytes, 0, "pool")], "DRAM")
        return bytes(self._agent.get_agent_metadata())

    def connect(self, meta: bytes, remote_pool_addr: int) -> None:
        """Load the other agent's metadata."""
        self._remote = self._agent.add_remote_agent(meta)
        self._remote_addr = remote_pool_addr

    def load(self, case: Case) -> None:
        """Prepare both pools' descriptors and one transfer."""
        if self._handle is not None:
            self._handle.release()
        shape = case.shape
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", _descriptors(self._addr, shape), "DRAM")
        remote = self._agent.prep_xfer_dlist(self._remote, _descriptors(self._remote_addr, shape), "DRAM")
        starts = (np.arange(shape.layers) * shape.pool_blocks)[:, None]
        ids = [(starts + side).ravel().astype(np.int32) for side in block_ids(case)]
        self._handle = self._agent.make_prepped_xfer("READ", local, ids[0], remote, ids[1])
        self._lists = (local, remote)

    def read(self) -> float:
        """Post the transfer and spin on its state, the fastest way NIXL offers."""
        start = time.perf_counter()
        state = self._agent.transfer(self._handle)
        blocking_s = time.perf_counter() - start
        while state == "PROC" and time.perf_counter() - start < READ_DEADLINE_S:
            state = self._agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL transfer is {state} after {time.perf_counter() - start:.1f} s")
        return blocking_s

    def close(self) -> None:
        """Release the transfer."""
        if self._handle is not None:
            self._handle.release()


def _descriptors(addr: int, shape: Shape) -> np.ndarray[Any, np.dtype[np.uint64]]:
    count = shape.layers * shape.pool_blocks
    descriptors = np.zeros((count, 3), np.uint64)
    descriptors[:, 0] = addr + np.arange(count, dtype=np.uint64) * np.uint64(shape.block_bytes)
    descriptors[:, 1] = shape.block_bytes
    return descriptors


if __name__ == "__main__":
    main(NixlEnd(**json.loads(sys.argv[1])))
