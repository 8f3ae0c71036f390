"""The benchmark of the store runs, small, and its figures fit together."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from kvrdma.bench import agent, lookups
from kvrdma.bench.engine import Shape
from kvrdma.bench.stores import request_nbytes
from kvrdma.bench.waits import waits_of

pytestmark = pytest.mark.needs("cma")

SMALL = Shape(layers=2, heads=2, head_dim=16, tokens=256, blocks=24)


def test_a_warm_prefix() -> None:
    result = agent.warm_prefix(SMALL, "cma", 3)
    assert result["nbytes"] == request_nbytes(SMALL) == 2 * 2 * 16 * 2 * 2 * 256
    assert isinstance(result["of_bare"], float)
    assert result["of_bare"] > 0


def test_lookups() -> None:
    result = lookups.lookups("cma", 5, blocks=32)
    assert result["messages_each"] == 1
    assert isinstance(result["median_ms"], float)
    assert 0 < result["median_ms"] <= float(str(result["worst_ms"]))
    for bare in ("echo", "socket"):
        assert 0 < float(str(result[f"{bare}_median_ms"])) <= float(str(result[f"{bare}_worst_ms"]))


def test_lookups_on_one_processor() -> None:
    processors = os.sched_getaffinity(0)
    result = lookups.lookups_alone("cma", 5, blocks=32)
    assert os.sched_getaffinity(0) == processors
    assert 0 < float(str(result["median_ms"])) <= float(str(result["worst_ms"]))


def test_readers() -> None:
    result = agent.readers(SMALL, "cma", 2, 3)
    assert result["reads"] == 6
    assert result["nbytes"] == 6 * request_nbytes(SMALL)
    cpu_ms, each_ms = (float(str(result[name])) for name in ("store_cpu_ms", "store_cpu_ms_per_read"))
    assert cpu_ms > 0, "the store answers a lookup for every read"
    assert each_ms == pytest.approx(cpu_ms / 6, abs=0.02)


def test_waits_of_threads_without_a_processor() -> None:
    """As many that spin as there are processors, and one: all get less than they could use."""
    counts = len(os.sched_getaffinity(0)) + 1
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(counts)]
    try:
        with waits_of([each.pid for each in spinning]) as waits_s:
            before_s = waits_s()
            deadline_s = time.monotonic() + 60
            while waits_s() < before_s + 0.05:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
    finally:
        for each in spinning:
            each.kill()
            each.wait()
    with pytest.raises(OSError, match="No such"), waits_of([spinning[0].pid]):
        pass


def test_a_lookup_without_its_waits() -> None:
    """Only what is beyond the usual wait counts as somebody else's doing."""
    assert lookups._without_waits([1.0, 3.0, 5.0], [0.5, 0.5, 4.5]) == [1.0, 3.0, 1.0]
