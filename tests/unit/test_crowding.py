"""Threads that move to another processor when they are crowded: what they must never change is where they may run."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvrdma.testing import PeerProcess
from kvrdma.transport import Device, ReadDone, open_transport, poll_until
from tests.helpers.stores import until

BLOCK, BLOCKS, READS = 4096, 8192, 4
ALLOWED = sorted(os.sched_getaffinity(0))


def _processor() -> int:
    """Where the calling thread runs."""
    return int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])


def _leave(state: SimpleNamespace, pinned: list[int], then: set[int]) -> list[tuple[bool, int, int, set[int]]]:
    """In threads that were put on a processor: whether each moved, from where to where, and what it may use then."""
    from kvrdma_cma import _cma

    found: list[tuple[bool, int, int, set[int]]] = []

    def leave(processor: int) -> None:
        os.sched_setaffinity(0, {processor})
        os.sched_setaffinity(0, then or {processor})
        before = _processor()
        moved = _cma.leave_processor()
        found.append((moved, before, _processor(), os.sched_getaffinity(0)))

    for processor in pinned:
        thread = threading.Thread(target=leave, args=(processor,))
        thread.start()
        thread.join()
    return found


def _neighbours(processor: int) -> set[int]:
    """The processors behind the same last-level cache; all that are allowed where the system does not say."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{processor}/cache/index3/shared_cpu_list").read_text()
    except OSError:
        return set(ALLOWED)
    spans = [[int(end) for end in span.split("-")] for span in text.split(",")]
    return {each for span in spans for each in range(span[0], span[-1] + 1)}


def test_a_thread_leaves_its_processor_and_may_return() -> None:
    with PeerProcess() as process:
        found = process.call(_leave, ALLOWED[:2] * 5, set(ALLOWED))
    assert len(found) == 5 * len(ALLOWED[:2])
    assert all(allowed == set(ALLOWED) for *_, allowed in found)
    expected = [bool(_neighbours(before) & set(ALLOWED) - {before}) for _, before, *_ in found]
    assert [moved for moved, *_ in found] == expected
    elsewhere = sum(before != after for _, before, after, _ in found)
    assert elsewhere >= sum(expected) - 3, found  # the scheduler may take one back at once


def test_a_thread_that_may_use_one_processor_stays() -> None:
    with PeerProcess() as process:
        found = process.call(_leave, ALLOWED[:1] * 3, set())
    assert found == [(False, ALLOWED[0], ALLOWED[0], {ALLOWED[0]})] * 3


def _affinities() -> dict[str, set[int]]:
    return {thread.name: os.sched_getaffinity(int(thread.name)) for thread in Path("/proc/self/task").iterdir()}


def _read(state: SimpleNamespace, transport: str, allowed: set[int]) -> int:
    """Read blocks in another order, several times, with every thread allowed somewhere; count wrong blocks."""
    source = np.arange(BLOCK * BLOCKS // 8, dtype=np.uint64).reshape(BLOCKS, -1)
    target = np.zeros_like(source)
    with closing(open_transport(transport)) as serving, closing(open_transport(transport)) as reading:
        key = serving.register(source.ctypes.data, source.nbytes, Device()).key
        reading.register(target.ctypes.data, target.nbytes, Device())
        peer = reading.connect(serving.address(), [key])
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), allowed)
        before = _affinities()
        wrong = 0
        for seed in range(READS):
            order = np.random.default_rng(seed).permutation(BLOCKS)
            rows = np.zeros((BLOCKS, 4), np.uint64)
            rows[:, 0] = target.ctypes.data + np.arange(BLOCKS) * BLOCK
            rows[:, 2] = order * BLOCK
            rows[:, 3] = BLOCK
            target.fill(0)
            read = reading.read(peer, rows)
            ended = poll_until(reading, read, 60)[-1]
            assert isinstance(ended, ReadDone), ended
            wrong += int((target != source[order]).any(axis=1).sum())
        until(lambda: _affinities() == before, _affinities)  # one may be on its way just now
        assert set(map(frozenset, before.values())) == {frozenset(allowed)}
    return wrong


@pytest.mark.parametrize("transport", ["cma", pytest.param("ucx", marks=pytest.mark.needs("ucx"))])
@pytest.mark.parametrize("processors", [1, 2])
def test_reads_leave_every_thread_allowed_where_it_was(transport: str, processors: int) -> None:
    with PeerProcess({"UCX_TLS": "tcp"}) as process:
        assert process.call(_read, transport, set(ALLOWED[:processors])) == 0
