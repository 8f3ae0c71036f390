"""A NIC that reports that it is lost (IBV_EVENT_DEVICE_FATAL): every peer and read ends, on both sides of the wire.

The event is injected (tests/helpers/device_fatal.py). What the kernel does when soft-RoCE is taken away is in
test_broken.py: it waits for who has it open, and tells nobody.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvrdma.errors import PeerLostError
from kvrdma.testing import PeerProcess
from kvrdma.testing import target as at
from kvrdma.testing.target import PAGE, Reader, done
from kvrdma.transport import Completion, Peer, PeerLost, ReadFailed, ReadId, open_transport, wait
from tests.helpers import device_fatal

pytestmark = pytest.mark.needs("verbs")
open_verbs = functools.partial(open_transport, "verbs")
BIG, LONG_S = 16 << 20, 60.0


@pytest.fixture(scope="module")  # it takes an emulated processor some seconds to start one
def process() -> Iterator[PeerProcess]:
    with PeerProcess() as peer:
        yield peer


def linked(process: PeerProcess, count: int) -> tuple[Reader, list[Peer]]:
    """A reader with so many connections that work."""
    process.call(at.open_target, open_verbs, [BIG], 1)
    reader = Reader.open(open_verbs(), BIG)
    peers = [reader.transport.connect(*process.call(at.exports)) for _ in range(count)]
    for peer in peers:
        done(reader.read(peer, reader.rows([(0, 0, 0, PAGE)])))
    return reader, peers


def post(reader: Reader, peers: list[Peer]) -> dict[ReadId, Peer]:
    """Have 256 MiB on their way on each connection, far more than passes until the next line has run."""
    reads = {reader.transport.read(peer, reader.rows([(0, 0, 0, PAGE)])): peer for peer in peers}
    rows = reader.rows([(0, 0, 0, BIG)])
    reads |= {reader.transport.read(peer, rows): peer for peer in peers for _ in range(16)}
    wait([reader.transport], LONG_S)  # a small one has ended, so they have begun; the large ones end together
    return reads


def until_lost(reader: Reader, peers: int) -> list[Completion]:
    """What ends until so many peers are lost; pytest ends it if that never comes."""
    ended: list[Completion] = []
    while sum(isinstance(each, PeerLost) for each in ended) < peers:
        wait([reader.transport], 1.0)
        ended += reader.transport.poll()
    return ended


def close_in_time(reader: Reader) -> None:
    began_s = time.monotonic()
    reader.transport.close()
    assert time.monotonic() - began_s < 5.0


def test_a_lost_device_ends_every_peer_and_read(process: PeerProcess) -> None:
    reader, peers = linked(process, 2)
    here = SimpleNamespace()
    device_fatal.prepare(here)
    reads = post(reader, peers)
    device_fatal.report(here)
    ended = until_lost(reader, 2)
    failed = [each for each in ended if isinstance(each, ReadFailed)]
    lost = [each for each in ended if isinstance(each, PeerLost)]
    assert sorted(each.peer for each in lost) == sorted(peer.id for peer in peers)
    assert sorted(each.read for each in ended if not isinstance(each, PeerLost)) == sorted(reads)
    assert {reads[each.read].id for each in failed} == {peer.id for peer in peers}, "no read was in flight?"
    for reason in [each.reason for each in failed] + [each.reason for each in lost]:
        assert isinstance(reason, PeerLostError)
        assert "rxe0:1 reports local catastrophic error" in str(reason)
    for peer in peers:
        with pytest.raises(PeerLostError, match="rxe0:1 reports local catastrophic error"):
            reader.transport.read(peer, reader.rows([(0, 0, 0, PAGE)]))
    assert reader.transport.poll() == []
    close_in_time(reader)
    process.call(at.close_target)


def test_who_reads_from_a_lost_device_is_told(process: PeerProcess) -> None:
    reader, (peer,) = linked(process, 1)
    process.call(device_fatal.prepare)
    reads = post(reader, [peer])
    process.call(device_fatal.report)
    ended = until_lost(reader, 1)
    failed = [each for each in ended if isinstance(each, ReadFailed)]
    assert isinstance(ended[-1], PeerLost)
    assert ended[-1].peer == peer.id
    assert sorted(each.read for each in ended[:-1]) == sorted(reads)  # type: ignore[union-attr]
    assert failed, "no read was in flight?"
    assert all(isinstance(each.reason, PeerLostError) for each in failed), failed
    close_in_time(reader)
    process.call(at.close_target)
