"""Deadlines and quarantine over a transport that misbehaves on demand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvrdma.errors import ConfigError, PeerLostError, ReadTimeoutError, TransportError
from kvrdma.inflight import InFlight, ReadReleased
from kvrdma.testing import FakeClock, Fault, FaultTransport
from kvrdma.testing import target as at
from kvrdma.testing.target import PAGE, Reader
from kvrdma.transport import Peer, PeerLost, ReadDone, ReadFailed, open_transport, wait


class Scene:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.owner = Reader.open(open_transport("memory"), PAGE)
        self.owner.buffer[:] = at.pattern(1, PAGE)
        self.transport = FaultTransport(open_transport("memory"))
        self.reader = Reader.open(self.transport, PAGE)
        self.peer: Peer = self.transport.connect(self.owner.transport.address(), [self.owner.region.key])
        self.reads = InFlight(self.transport, self.clock)
        self.rows = self.reader.rows([(0, 0, 0, 64), (128, 0, 64, 64)])


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.transport.close()
    scene.owner.transport.close()


def test_done_in_time(scene: Scene) -> None:
    read = scene.reads.read(scene.peer, scene.rows, 5)
    assert scene.reads.next_deadline_s() == 1005.0
    assert scene.reads.poll() == [ReadDone(read, scene.peer.id, 2, 2, 128)]
    scene.clock.advance(100)
    assert scene.reads.poll() == []
    assert scene.reads.next_deadline_s() is None
    scene.reader.check(scene.rows, [scene.owner.buffer])


def test_late_read_stays_quarantined_until_it_ends(scene: Scene) -> None:
    scene.transport.inject(Fault.LATE)
    read = scene.reads.read(scene.peer, scene.rows, 5)
    scene.clock.advance(4.999)
    assert scene.reads.poll() == []
    scene.clock.advance(0.001)
    (failed,) = scene.reads.poll()
    assert isinstance(failed, ReadFailed)
    assert isinstance(failed.reason, ReadTimeoutError)
    assert "5 s; its destination is quarantined" in str(failed.reason)
    assert scene.reads.quarantined == (read,)
    assert scene.reads.poll() == []  # told once
    scene.reader.check(scene.rows[:0], [scene.owner.buffer])  # nothing written yet
    assert scene.transport.release() == 1
    assert scene.reads.poll() == [ReadReleased(read)]
    scene.reader.check(scene.rows, [scene.owner.buffer])  # it did write, after it had been reported as failed
    assert not scene.reads.quarantined


def test_read_that_never_ends_stays_quarantined(scene: Scene) -> None:
    scene.transport.inject(Fault.NEVER)
    read = scene.reads.read(scene.peer, scene.rows, 5)
    scene.clock.advance(6)
    assert len(scene.reads.poll()) == 1
    scene.clock.advance(1e6)
    assert scene.reads.poll() == []
    assert scene.reads.quarantined == (read,)


def test_inline_completion(scene: Scene) -> None:
    scene.transport.inject(Fault.INLINE)
    read = scene.reads.read(scene.peer, scene.rows, 5)
    assert wait([scene.transport], 0)
    assert scene.reads.poll() == [ReadDone(read, scene.peer.id, 2, 2, 128)]


def test_failure_at_post_leaves_nothing_in_flight(scene: Scene) -> None:
    scene.transport.inject(Fault.FAIL_AT_POST)
    with pytest.raises(PeerLostError):
        scene.reads.read(scene.peer, scene.rows, 5)
    scene.clock.advance(10)
    assert scene.reads.poll() == []


def test_half_written_read_fails(scene: Scene) -> None:
    scene.transport.inject(Fault.HALF_WRITTEN)
    read = scene.reads.read(scene.peer, scene.rows, 5)
    (failed,) = scene.reads.poll()
    assert isinstance(failed, ReadFailed)
    assert failed.read == read
    scene.reader.check(scene.rows[:1], [scene.owner.buffer])


def test_lost_peer_passes_through(scene: Scene) -> None:
    scene.transport.inject(Fault.LOSE_PEER)
    read = scene.reads.read(scene.peer, scene.rows, 5)
    failed, lost = scene.reads.poll()
    assert isinstance(failed, ReadFailed)
    assert failed.read == read
    assert isinstance(lost, PeerLost)
    with pytest.raises(PeerLostError):
        scene.reads.read(scene.peer, scene.rows, 5)


def test_failed_read_is_reported_once(scene: Scene) -> None:
    scene.transport.inject(Fault.FAIL_AT_POLL)
    read = scene.reads.read(scene.peer, scene.rows, 5)
    (failed,) = scene.reads.poll()
    assert isinstance(failed, ReadFailed)
    assert (failed.read, type(failed.reason)) == (read, TransportError)
    scene.clock.advance(10)
    assert scene.reads.poll() == []


def test_each_read_has_its_own_deadline(scene: Scene) -> None:
    scene.transport.inject(Fault.NEVER, Fault.NEVER)
    late = scene.reads.read(scene.peer, scene.rows, 50)
    early = scene.reads.read(scene.peer, scene.rows, 5)
    assert scene.reads.next_deadline_s() == 1005.0
    scene.clock.advance(10)
    assert [outcome.read for outcome in scene.reads.poll() if isinstance(outcome, ReadFailed)] == [early]
    assert scene.reads.next_deadline_s() == 1050.0
    scene.clock.advance(50)
    assert [outcome.read for outcome in scene.reads.poll() if isinstance(outcome, ReadFailed)] == [late]


def test_timeout_must_be_positive(scene: Scene) -> None:
    with pytest.raises(ConfigError, match="timeout_s=0"):
        scene.reads.read(scene.peer, scene.rows, 0)
