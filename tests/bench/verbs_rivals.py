"""What a row costs `kvrdma_ucx` and NIXL until it has been posted, beside the null post of `scripts/bench-verbs`.

``python -m tests.bench.verbs_rivals ucx|nixl``: rows of 64 bytes, both ends in one process, so that UCX's copying is as
short as it gets: it reads by cma while it posts, and how much of the time that is cannot be told apart from outside.
Prints one JSON object per pattern. NIXL is run in the interpreter of its own venv: it bundles a UCX of its own.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvrdma.bench.patterns import PATTERNS, Bytes, Case, Shape, block_ids, rows_of

SHAPE = Shape(layers=32, blocks=512, block_bytes=64)
ROUNDS, WARM = 15, 3


def pools() -> tuple[Bytes, Bytes]:
    return np.zeros(SHAPE.pool_nbytes, np.uint8), np.full(SHAPE.pool_nbytes, 7, np.uint8)


def report(who: str, pattern: str, **seconds: list[float]) -> dict[str, Any]:
    """Medians over the rounds, in nanoseconds per row."""
    medians = {
        f"{name}_ns_per_row": round(statistics.median(all_s[WARM:]) / SHAPE.rows * 1e9, 1)
        for name, all_s in seconds.items()
    }
    return {"bench": who, "pattern": pattern, "rows": SHAPE.rows, "rounds": ROUNDS, **medians}


def ucx(pattern: str) -> dict[str, Any]:
    """Measure ``read()`` until it returns, and until the last row has arrived."""
    from kvrdma.testing.target import done, register
    from kvrdma.transport import poll_until
    from tests.contract.test_ucx import OneSidedUcx

    mine, theirs = pools()
    target, reader = OneSidedUcx(), OneSidedUcx()
    region = register(target, theirs)
    register(reader, mine)
    peer = reader.connect(target.address(), [region.key])
    assert peer.one_sided, peer.via
    rows = rows_of(Case(pattern, SHAPE), mine.ctypes.data)
    called, ended = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        read = reader.read(peer, rows)
        called.append(time.perf_counter() - start)
        done(poll_until(reader, read, 60.0)[-1])
        ended.append(time.perf_counter() - start)
    assert mine.sum() == 7 * SHAPE.nbytes
    reader.close()
    target.close()
    return report(f"kvrdma_ucx {peer.via}", pattern, caller=called, until_last=ended)


def nixl(pattern: str) -> dict[str, Any]:
    """Measure making a transfer from prepared lists, as vLLM's NixlConnector does per request, and posting it."""
    from nixl._api import nixl_agent, nixl_agent_config

    mine, theirs = pools()
    config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    reader, target = (nixl_agent(f"{name}-{time.monotonic_ns()}", config) for name in ("reader", "target"))
    for agent, pool in ((reader, mine), (target, theirs)):
        agent.register_memory([(pool.ctypes.data, len(pool), 0, "pool")], "DRAM")
    other = reader.add_remote_agent(target.get_agent_metadata())
    lists = [
        reader.prep_xfer_dlist(name, _descriptors(pool.ctypes.data), "DRAM")
        for name, pool in (("NIXL_INIT_AGENT", mine), (other, theirs))
    ]
    starts = (np.arange(SHAPE.layers) * SHAPE.pool_blocks)[:, None]
    ids = [(starts + side).ravel().astype(np.int32) for side in block_ids(Case(pattern, SHAPE))]
    made, posted, ended = [], [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        handle = reader.make_prepped_xfer("READ", lists[0], ids[0], lists[1], ids[1])
        middle = time.perf_counter()
        state = reader.transfer(handle)
        posted.append(time.perf_counter() - middle)
        while state == "PROC":
            state = reader.check_xfer_state(handle)
            target.get_new_notifs()  # its progress
        assert state == "DONE", state
        made.append(middle - start)
        ended.append(time.perf_counter() - start)
        handle.release()
    assert mine.sum() == 7 * SHAPE.nbytes
    return report("nixl 1.5.1", pattern, make=made, post=posted, until_last=ended)


def _descriptors(addr: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    count = SHAPE.layers * SHAPE.pool_blocks
    descriptors = np.zeros((count, 3), np.uint64)
    descriptors[:, 0] = addr + np.arange(count, dtype=np.uint64) * np.uint64(SHAPE.block_bytes)
    descriptors[:, 1] = SHAPE.block_bytes
    return descriptors


if __name__ == "__main__":
    measure: Callable[[str], dict[str, Any]] = {"ucx": ucx, "nixl": nixl}[sys.argv[1]]
    for each in PATTERNS:
        print(json.dumps(measure(each)), flush=True)
