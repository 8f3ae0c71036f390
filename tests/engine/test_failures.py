"""Pulls that fail: once, with their reason, when nothing can write any more, and without harm to others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvrdma.engine import End
from kvrdma.errors import PullAbortedError, PullError, PullTimeoutError, TransportClosedError, TransportError
from kvrdma.testing import Fault
from tests.helpers.faulty_pair import WORD, Scene, until
from tests.helpers.tagged import SMALL, busy, done, ended, failed, released


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


STAGES = {"word before": ("none", 0), "data and word": ("none", 1), "word after checksums": ("digest", 2)}
"""Reads of a pull: what has to be verified for that one to be made, and how many come before it."""
each_stage = pytest.mark.parametrize(("verify", "at"), STAGES.values(), ids=STAGES)


@pytest.fixture
def staged(verify: str) -> Iterator[Scene]:
    scene = Scene(replace(SMALL, verify=verify))
    yield scene
    scene.close()


# Retries


@pytest.mark.parametrize("fault", [Fault.FAIL_AT_POST, Fault.FAIL_AT_POLL, Fault.HALF_WRITTEN, Fault.LOSE_PEER])
@each_stage
def test_one_failure_is_retried_on_a_fresh_connection(staged: Scene, fault: Fault, at: int) -> None:
    scene = staged
    scene.fault.inject(*[Fault.NONE] * at, fault)
    event = done(scene.rank.pull(1, scene.publish(), [0, 1, 2]))
    assert event.attempts == 2
    assert scene.rank.cache.wrong(1, [0, 1, 2], range(12)) == []
    stats = scene.rank.engine.stats()
    assert (stats["pulls_retried"], stats["handshakes"], stats["pulls_failed"]) == (1, 2, 0)
    until(lambda: busy(scene.rank.engine) == {})


@each_stage
def test_two_failures_are_the_end(staged: Scene, at: int) -> None:
    scene = staged
    scene.fault.inject(*[Fault.NONE] * at, Fault.FAIL_AT_POLL, *[Fault.NONE] * at, Fault.FAIL_AT_POLL)
    event = failed(scene.rank.pull(1, scene.publish(), [0, 1, 2]))
    assert isinstance(event.reason, TransportError)
    assert (event.attempts, event.quarantined) == (2, False)
    until(lambda: busy(scene.rank.engine) == {})
    assert ended(scene.sender.wait_for()[0]).how is End.DONE  # the producer is told all the same


@pytest.mark.parametrize("fault", [Fault.INLINE, Fault.LATE])
def test_early_and_late_completions_are_fine(scene: Scene, fault: Fault) -> None:
    scene.fault.inject(fault, fault, fault)
    scene.rank.engine.pull(1, scene.publish(), [0, 1, 2])
    deadline_s = time.monotonic() + 10
    while not (events := scene.rank.engine.wait(0.02)):
        scene.fault.release()
        assert time.monotonic() < deadline_s
    assert done(events[0]).attempts == 1
    assert scene.rank.cache.wrong(1, [0, 1, 2], range(12)) == []


def test_a_connection_given_up_for_one_pull_costs_the_others_no_strike(scene: Scene) -> None:
    """Twice a neighbour's read fails; each time the shared connection goes, and the innocent pull starts again."""
    scene.fault.inject(WORD, Fault.LATE)
    scene.rank.engine.pull("innocent", scene.publish(1, [8, 6, 7]), [0, 1, 2])
    until(lambda: len(scene.fault._held) == 1)
    for number in (2, 3, 4):
        scene.fault.inject(WORD, Fault.FAIL_AT_POLL)
        scene.rank.engine.pull(number, scene.publish(number, [number]), [number])
        time.sleep(0.05)
    events = {event.request_id: event for event in scene.rank.wait_for(4)}
    assert {key: done(event).request_id for key, event in events.items()} == {k: k for k in ("innocent", 2, 3, 4)}


# Deadlines and quarantine


@each_stage
def test_a_read_that_ends_with_its_connection_is_failed_at_the_deadline(staged: Scene, at: int) -> None:
    staged.fault.inject(*[Fault.NONE] * at, Fault.LATE)
    began_s = time.monotonic()
    event = failed(staged.rank.pull(1, staged.publish(), [0, 1, 2], timeout_s=0.5))
    assert isinstance(event.reason, PullTimeoutError)
    assert not event.quarantined
    assert 0.5 <= time.monotonic() - began_s < 8
    until(lambda: busy(staged.rank.engine) == {})


def test_a_read_that_never_ends_is_quarantined_and_later_released(
    short: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrdma.engine.consumer._QUARANTINE_AFTER_S", 0.3)
    engine = short.rank.engine
    short.fault.inject(WORD, Fault.STUCK)
    event = failed(short.rank.pull(1, short.publish(), [0, 1, 2]))
    assert isinstance(event.reason, PullTimeoutError)
    assert event.quarantined
    assert engine.stats()["quarantined"] == 1
    assert engine.stats()["landing"] == 1  # its word is not given to another pull
    with pytest.raises(PullError, match="is under way"):
        engine.pull(1, short.publish(2), [0, 1, 2])
    done(short.rank.pull(2, short.publish(3, [1]), [5], timeout_s=20))  # others go on
    short.fault.release()
    assert released(short.rank.wait_for()[0]).request_id == 1
    until(lambda: busy(engine) == {})
    done(short.rank.pull(1, short.publish(4, [2]), [0], timeout_s=20))


def test_pulls_whose_time_is_over_together_all_say_so(short: Scene) -> None:
    """The first one's timeout disconnects the peer; the others' reads are cancelled by that a moment early."""
    references = [short.publish(n, [n]) for n in range(8)]
    short.fault.inject(*[WORD] * 8, *[Fault.LATE] * 8)
    for number, reference in enumerate(references):
        short.rank.engine.pull(number, reference, [number])
    for event in short.rank.wait_for(8):
        assert isinstance(failed(event).reason, PullTimeoutError)


def test_what_never_ends_is_quarantined_at_close(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.fault.inject(WORD, Fault.NEVER)
    scene.rank.engine.pull(1, scene.publish(), [0, 1, 2])
    until(lambda: scene.rank.engine.stats()["reads"] == 1 and not scene.fault._faults)
    scene.rank.engine.close()
    (event,) = scene.rank.engine.poll()
    assert failed(event).quarantined
    assert isinstance(failed(event).reason, PullAbortedError)
    scene.close()


# Close


def test_close_ends_every_pull_and_publication_once() -> None:
    scene = Scene()
    reference = scene.publish(1, [8])
    scene.fault.inject(WORD, Fault.LATE)
    for number in range(5):
        scene.rank.engine.pull(number, reference, [number])
    scene.rank.engine.close()
    scene.rank.engine.close()
    events = scene.rank.engine.poll()
    assert sorted(str(event.request_id) for event in events) == list("01234")
    assert all(isinstance(failed(event).reason, PullAbortedError) for event in events)
    assert not any(failed(event).quarantined for event in events)
    until(lambda: busy(scene.rank.engine) == {})
    for call in (lambda: scene.rank.engine.pull(9, reference, [0]), lambda: scene.rank.engine.publish(9, [0], 1)):
        with pytest.raises(TransportClosedError):
            call()
    scene.sender.engine.close()
    (end,) = scene.sender.engine.poll()
    assert ended(end).how in {End.WITHDRAWN, End.DONE}
    scene.close()


def test_a_defect_ends_every_pull_and_says_so(scene: Scene) -> None:
    engine = scene.rank.engine
    scene.fault.inject(WORD, Fault.LATE)
    engine.pull(1, scene.publish(), [0, 1, 2])
    until(lambda: len(scene.fault._held) == 1)
    engine._loop.run(lambda: {}["defect"])  # type: ignore[index]
    assert isinstance(failed(scene.rank.wait_for()[0]).reason, PullAbortedError)
    with pytest.raises((PullError, TransportClosedError), match=r"defect|closed"):
        engine.pull(2, scene.publish(2, [1]), [0])


def test_a_defect_met_by_one_pull_is_that_pull_s_failure(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("kvrdma.plan.Planner.plan", broken)
        event = failed(scene.rank.pull(1, scene.publish(), [0, 1, 2]))
    assert "met a defect: ZeroDivisionError()" in str(event.reason)
    done(scene.rank.pull(2, scene.publish(2), [0, 1, 2]))
