"""What `kvrdma.testing` gives to tests of other projects: with and without pytest, and in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kvrdma.errors import ReadTimeoutError
from kvrdma.testing import Fault, FaultTransport, PeerProcess, TransportContract, freeze
from kvrdma.testing.target import Factory, Target
from kvrdma.transport import Transport
from kvrdma_memory import MemoryTransport

WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None  # as if it were not installed
from kvrdma.testing import FakeClock, Fault, FaultTransport, PeerProcess, PeerProcessError
for name in ("TransportContract", "ProcessContract"):
    try:
        exec(f"from kvrdma.testing import {name}")
    except ImportError as error:
        print(error)
"""


def test_all_but_the_contract_suite_works_without_pytest() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_PYTEST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    why = "is a pytest suite: pip install pytest, or 'kvrdma[dev]'"
    assert done.stdout.splitlines() == [f"TransportContract {why}", f"ProcessContract {why}"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        __import__("kvrdma.testing").testing.Nonsense  # noqa: B018


def _never() -> Transport:
    faulty = FaultTransport(MemoryTransport(), [Fault.NEVER] * 4)
    faulty.name = "memory"  # type: ignore[misc]
    return faulty


class Suite(TransportContract):
    factory: ClassVar[Factory] = staticmethod(_never)
    timeout_s = 0.05


def test_a_transport_that_never_completes_costs_the_suite_s_own_deadline() -> None:
    suite = Suite()
    opened: list[Transport] = []
    targets: list[Target] = []
    suite._transports, suite._targets = opened, targets
    reader, _, peer, _ = suite.link(64, [64])
    rows = reader.rows([(0, 0, 0, 8)])
    started = time.monotonic()
    with pytest.raises(ReadTimeoutError, match=r"within 0\.05 s"):
        reader.read(peer, rows)
    with pytest.raises(ReadTimeoutError, match=r"within 0\.05 s"):
        reader.drain({reader.transport.read(peer, rows)})
    assert time.monotonic() - started < 20
    for transport in opened:
        transport.close()
    for target in targets:
        target.close()


def _count(state: SimpleNamespace, path: str) -> None:
    """Count in a file from four threads, without end."""

    def count(seek: int) -> None:
        number = 0
        while True:
            os.pwrite(state.file, number.to_bytes(8, "little"), seek)
            number += 1

    state.file = os.open(path, os.O_RDWR)
    for thread in range(4):
        threading.Thread(target=count, args=(thread * 8,), daemon=True).start()


def test_a_frozen_process_has_done_its_last_deed_when_the_signal_returns(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    path.write_bytes(bytes(32))
    with PeerProcess() as process:
        process.call(_count, str(path))
        for _ in range(50):
            process.signal(signal.SIGSTOP)
            before = path.read_bytes()
            time.sleep(0.005)
            assert path.read_bytes() == before
            process.signal(signal.SIGCONT)
            time.sleep(0.002)
        assert any(path.read_bytes())
        process.kill()


def test_nobody_freezes_what_is_not_there() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(ProcessLookupError):
        freeze(gone.pid)
