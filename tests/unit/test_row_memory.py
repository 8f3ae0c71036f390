"""What a batch costs beyond the caller's array, for the native transports."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = 1_000_000


@pytest.mark.parametrize("transport", [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("cma", "ucx")])
def test_extra_memory_per_row(transport: str) -> None:
    """At most 64 bytes a row at its peak, sorting included; both ends are in the process that is measured."""
    script = f"""
        import numpy as np, threading, time
        from kvrdma.testing.target import Reader
        from kvrdma.transport import open_transport, poll_until
        def peak():
            lines = open("/proc/self/status").read().splitlines()
            return 1024 * int(next(l for l in lines if l.startswith("VmHWM")).split()[1])
        owner = Reader.open(open_transport("{transport}"), 64 * {COUNT} * 2)
        reader = Reader.open(open_transport("{transport}"), 64 * {COUNT} * 2)
        peer = reader.transport.connect(owner.transport.address(), [owner.region.key])
        rng = np.random.default_rng(0)
        rows = np.zeros(({COUNT}, 4), np.uint64)
        rows[:, 0] = reader.buffer.ctypes.data + 64 * rng.permutation(2 * {COUNT})[:{COUNT}]
        rows[:, 2] = 64 * rng.permutation(2 * {COUNT})[:{COUNT}]
        rows[:, 3] = 8
        poll_until(reader.transport, reader.transport.read(peer, rows[:100_000]))
        open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
        start = peak()
        read = reader.transport.read(peer, rows)
        poll_until(reader.transport, read)
        print((peak() - start) / {COUNT})
    """
    lines = "\n".join(line[8:] for line in script.splitlines())
    ended = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True, timeout=120)
    assert float(ended.stdout) <= 64
