"""Leases between two engines: withdrawn, expired, held, declined; and aborts at every stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from kvrdma.engine import End
from kvrdma.engine.links import PeerEngine
from kvrdma.engine.peers import Peers, Waiter
from kvrdma.errors import LeaseError, LeaseRevokedError, PullAbortedError, PullTimeoutError
from kvrdma.lease import LeaseKey
from kvrdma.reference import PullReference
from kvrdma.testing import Fault
from tests.helpers.faulty_pair import MODEL, WORD, Scene, until
from tests.helpers.tagged import SMALL, Side, busy, done, ended, failed


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


@pytest.fixture
def short() -> Iterator[Scene]:
    scene = Scene(replace(SMALL, pull_timeout_s=0.5))
    yield scene
    scene.close()


# The lease


def test_a_withdrawn_publication_is_not_pulled(scene: Scene) -> None:
    reference = scene.publish()
    assert scene.sender.engine.withdraw(1)
    assert not scene.sender.engine.withdraw(1)
    assert ended(scene.sender.wait_for()[0]).how is End.WITHDRAWN
    event = failed(scene.rank.pull(1, reference, [0, 1, 2]))
    assert isinstance(event.reason, LeaseRevokedError)
    assert "before the data was read" in str(event.reason)
    assert scene.rank.cache.wrong(0, [], range(0)) == []  # not a byte was moved
    assert scene.rank.engine.stats()["fence_rejections"] == 1


@pytest.mark.parametrize("how", ["withdraw", "expire"])
def test_a_lease_that_ends_while_the_data_is_on_its_way(how: str) -> None:
    scene = Scene(replace(SMALL, lease_s=0.4 if how == "expire" else 30))
    scene.fault.inject(WORD, Fault.LATE)
    scene.rank.engine.pull(1, scene.publish(), [0, 1, 2])
    until(lambda: len(scene.fault._held) == 1)
    if how == "withdraw":
        scene.sender.engine.withdraw(1)
    else:
        # heartbeats keep it alive, so the consumer's are silenced
        scene.rank.engine._tenant._needed.clear()
    end = ended(scene.sender.wait_for()[0])
    assert end.how is {"withdraw": End.WITHDRAWN, "expire": End.EXPIRED}[how]
    scene.sender.cache.write(666, [8, 6, 7], range(12))  # the blocks are reused at once
    time.sleep(0.01)
    scene.fault.release()
    event = failed(scene.rank.wait_for()[0])
    assert isinstance(event.reason, LeaseRevokedError)
    assert "before the data had arrived" in str(event.reason)
    assert not event.quarantined
    until(lambda: busy(scene.rank.engine) == {})
    scene.close()


def test_a_reference_that_was_consumed_fails_and_the_reuse_is_not_served(scene: Scene) -> None:
    reference = scene.publish(1)
    done(scene.rank.pull(1, reference, [0, 1, 2]))
    scene.sender.wait_for()
    scene.publish(2)
    assert isinstance(failed(scene.rank.pull("again", reference, [3, 4, 5])).reason, LeaseRevokedError)


def test_data_read_before_the_producer_published_is_not_served(scene: Scene) -> None:
    """The reference is known before this rank has published, as with the ranks of one engine."""
    reference = replace_lease(scene.publish(1), slot=3, generation_plus=10)
    scene.rank.engine.pull("early", reference, [0, 1, 2])
    time.sleep(0.1)  # it looks at the word again and again
    assert scene.rank.engine.poll() == []
    scene.sender.cache.write(5, [8, 6, 7], range(12))
    scene.sender.engine.publish("r5", [8, 6, 7], 12, lease=reference.lease)
    done(scene.rank.wait_for()[0])
    assert scene.rank.cache.wrong(5, [0, 1, 2], range(12)) == []


def test_a_rank_that_never_publishes_is_a_timeout(short: Scene) -> None:
    event = failed(short.rank.pull(1, replace_lease(short.publish(1), 3, 10), [0, 1, 2]))
    assert isinstance(event.reason, PullTimeoutError)
    assert "waiting for 1 ranks to publish" in str(event.reason)
    until(lambda: busy(short.rank.engine) == {})


def replace_lease(reference: PullReference, slot: int, generation_plus: int) -> PullReference:
    lease = LeaseKey(slot, reference.lease.generation + generation_plus)
    return msgspec.structs.replace(reference, lease=lease)


def test_hold_keeps_a_lease_alive_under_a_stalled_caller() -> None:
    scene = Scene(replace(SMALL, lease_s=0.6))
    reference = scene.publish()
    scene.rank.engine.hold(1, reference)
    time.sleep(2.0)  # more than three leases; nobody calls anything
    assert scene.sender.engine.poll() == []
    assert scene.rank.engine.stats()["held"] == 1
    done(scene.rank.pull(1, reference, [0, 1, 2]))
    until(lambda: busy(scene.rank.engine) == {})
    scene.close()


def test_a_hold_ends_by_itself_and_then_the_lease_does() -> None:
    scene = Scene(replace(SMALL, lease_s=0.5))
    scene.rank.engine.hold(1, scene.publish(), for_s=0.8)
    assert ended(scene.sender.wait_for()[0]).how is End.EXPIRED
    until(lambda: busy(scene.rank.engine) == {})
    scene.close()


def test_a_hold_on_a_producer_out_of_reach_is_tried_again() -> None:
    config = replace(SMALL, lease_s=0.6, control_timeout_s=0.2)
    with Side(MODEL, "same", config=config) as producer, Side(MODEL, config=config) as consumer:
        reference = producer.publish(1, [1], 4)
        rank = consumer.ranks[0]
        lost = msgspec.structs.replace(reference, port=1)
        rank.engine.hold(1, lost, for_s=1.5)
        until(lambda: rank.engine.stats()["handshakes_failed"] >= 2)
        rank.engine.abort(1)
        until(lambda: busy(rank.engine) == {})


def test_a_reference_with_a_lease_of_no_length_keeps_nobody_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """References come from clients: what they name must not become a loop without a rest."""
    real, asked = Peers.find, list[float]()

    def find(peers: Peers, reference: PullReference, waiter: Waiter) -> None:
        asked.append(time.monotonic())
        real(peers, reference, waiter)

    monkeypatch.setattr(Peers, "find", find)
    with Side(MODEL, "same", config=replace(SMALL, control_timeout_s=0.2)) as producer, Side(MODEL) as consumer:
        engine = consumer.ranks[0].engine
        lost = msgspec.structs.replace(producer.publish(1, [1], 4), port=1, lease_s=1e-9)
        engine.hold(1, lost)
        until(lambda: len(asked) >= 8)
        engine.abort(1)
    assert min(later - sooner for sooner, later in pairwise(asked)) >= 0.09


def test_decline_tells_the_producer_and_reports_nothing(scene: Scene) -> None:
    scene.rank.engine.decline(scene.publish())
    assert ended(scene.sender.wait_for()[0]).how is End.DONE
    assert scene.rank.engine.poll() == []
    until(lambda: busy(scene.rank.engine) == {})


def test_every_lease_taken() -> None:
    with Side(MODEL, config=replace(SMALL, fence_slots=2)) as producer:
        producer.publish(1, [1], 4)
        producer.publish(2, [2], 4)
        with pytest.raises(LeaseError, match="all 2 leases are taken"):
            producer.publish(3, [3], 4)
        assert producer.ranks[0].engine.withdraw(1)
        producer.publish(3, [3], 4)


# Aborts


@pytest.mark.parametrize("stage", ["queued", "handshaking", "word", "reading", "after"])
def test_abort_at_every_stage(scene: Scene, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scene.rank.engine
    reference = scene.publish()
    if stage == "handshaking":
        slow = scene.rank.engine._peers._connect

        def connect(ref: PullReference) -> PeerEngine:
            time.sleep(0.3)
            return slow(ref)

        monkeypatch.setattr(engine._peers, "_connect", connect)
    held = {"word": [Fault.LATE], "reading": [WORD, Fault.LATE]}
    scene.fault.inject(*held.get(stage, []))
    if stage == "queued":
        engine._loop.run(lambda: time.sleep(0.2))
    engine.pull(1, reference, [0, 1, 2])
    if stage in held:
        until(lambda: engine.stats()["reads"] == 1 and len(scene.fault._held) == 1)
    if stage == "handshaking":
        until(lambda: engine.stats()["connecting"] == 1)
    if stage == "after":
        done(scene.rank.wait_for()[0])
        engine.abort(1)
        time.sleep(0.1)
        assert engine.poll() == []
        return
    engine.abort(1)
    if stage in held:
        time.sleep(0.1)
        assert engine.poll() == []  # a read may still write: not reported before it has ended
        scene.fault.release()
    event = failed(scene.rank.wait_for()[0])
    assert isinstance(event.reason, PullAbortedError)
    assert not event.quarantined
    until(lambda: busy(engine) == {})
    assert ended(scene.sender.wait_for()[0]).request_id == 1  # the producer has its blocks back at once
    done(scene.rank.pull(1, scene.publish(2), [3, 4, 5]))
    assert engine.poll() == []


def test_an_aborted_pull_and_its_successor_of_the_same_id_share_a_handshake(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scene.rank.engine
    slow = engine._peers._connect

    def connect(reference: PullReference) -> PeerEngine:
        time.sleep(0.2)
        return slow(reference)

    monkeypatch.setattr(engine._peers, "_connect", connect)
    reference = scene.publish()
    engine.pull(1, reference, [0, 1, 2])
    engine.abort(1)
    assert isinstance(failed(scene.rank.wait_for()[0]).reason, PullAbortedError)
    engine.pull(1, reference, [3, 4, 5])
    done(scene.rank.wait_for()[0])
    assert scene.rank.cache.wrong(1, [3, 4, 5], range(12)) == []  # and not a byte in blocks 0 to 2
    assert engine.stats()["handshakes"] == 1
