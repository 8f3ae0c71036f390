"""What runs on an RDMA device beyond the contract: link test, an engine and its fence, a port that goes down."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvrdma.errors import ConnectError, PeerLostError
from kvrdma.testing import PeerProcess
from kvrdma.testing import target as at
from kvrdma.testing.peer import freeze
from kvrdma.testing.target import PAGE, Reader, done
from kvrdma.transport import Peer, PeerLost, ReadFailed, open_transport, wait
from tests.helpers.faulty_pair import MODEL
from tests.helpers.tagged import SMALL, Side, pulls_and_is_fenced

pytestmark = pytest.mark.needs("verbs")
open_verbs = functools.partial(open_transport, "verbs")
NETDEV = os.environ.get("NETDEV", "")
LOST_S = 20.0
"""RC gives up after retries that take some seconds; an emulated processor adds to that."""


def _cli(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvrdma", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, **environ},
    )


def test_link_test_over_verbs() -> None:
    sizes = ("--nbytes", "1MiB", "--block", "4KiB", "--iters", "3", "--pattern", "fragmented")
    told = _cli("link-test", "--transport", "verbs", "--require-rdma", "--json", *sizes)
    assert told.returncode == 0, told.stdout + told.stderr
    report = json.loads(told.stdout)
    assert (report["transport"], report["one_sided"], report["verified"]) == ("verbs", True, True)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    both = [Side(MODEL, transport=open_verbs, config=SMALL) for _ in range(2)]
    yield both[0], both[1]
    for side in both:
        side.close()


def test_an_engine_pulls_and_its_fence_holds(sides: tuple[Side, Side]) -> None:
    assert "verbs" in pulls_and_is_fenced(*sides).via[0]


@pytest.fixture(scope="module")  # it takes an emulated processor some seconds to start one
def process() -> Iterator[PeerProcess]:
    with PeerProcess() as peer:
        yield peer


def linked(process: PeerProcess) -> tuple[Reader, Peer]:
    """A reader, and a fresh region of the other process."""
    process.call(at.open_target, open_verbs, [PAGE], 1)
    reader = Reader.open(open_verbs(), PAGE)
    return reader, reader.transport.connect(*process.call(at.exports))


def test_a_stopped_process_is_read(process: PeerProcess) -> None:
    reader, peer = linked(process)
    rows = reader.rows([(0, 0, 0, PAGE)])
    freeze(process.pid)
    try:
        done(reader.read(peer, rows))
    finally:
        process.signal(signal.SIGCONT)
    reader.check(rows, [at.pattern(1, PAGE)])
    reader.transport.close()
    process.call(at.close_target)


@pytest.mark.skipif(not NETDEV, reason="only the guest says which device carries RDMA")
def test_a_port_that_goes_down_ends_its_peers_and_comes_back(process: PeerProcess) -> None:
    reader, peer = linked(process)
    rows = reader.rows([(0, 0, 0, PAGE)])
    done(reader.read(peer, rows))
    subprocess.run(["ip", "link", "set", NETDEV, "down"], check=True)
    try:
        began_s = time.monotonic()
        try:
            ended_read = reader.finish(reader.transport.read(peer, rows), LOST_S)
            assert isinstance(ended_read, ReadFailed)
            assert isinstance(ended_read.reason, PeerLostError)
        except PeerLostError:
            pass  # the port had reported before
        assert time.monotonic() - began_s < LOST_S
        with pytest.raises(ConnectError):
            reader.transport.connect(*process.call(at.exports))
    finally:
        subprocess.run(["ip", "link", "set", NETDEV, "up"], check=True)
    while wait([reader.transport], 1.0) and not any(isinstance(c, PeerLost) for c in reader.transport.poll()):
        pass
    again = None
    for _ in range(60):
        with suppress(ConnectError):
            again = reader.transport.connect(*process.call(at.exports))
            break
        time.sleep(0.5)
    assert again is not None, "no connection after the link has come back"
    reader.buffer[:] = at.POISON
    done(reader.read(again, rows))
    reader.check(rows, [at.pattern(1, PAGE)])
    reader.transport.close()
    process.call(at.close_target)
