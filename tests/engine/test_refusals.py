"""What the caller, the reference or the peer gets wrong, and who may talk to whom."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kvrdma.breaker import CircuitBreaker
from kvrdma.engine import Engine
from kvrdma.engine.digest import answer_digests, compare_digests
from kvrdma.engine.links import Ask, PeerEngine
from kvrdma.engine.pull import Pull
from kvrdma.errors import (
    AuthenticationError,
    ConfigError,
    DataError,
    IncompatibleError,
    KVRDMAError,
    LeaseRevokedError,
    MessageError,
    PeerLostError,
    PeerUnavailableError,
    PlanError,
    PullAbortedError,
    PullError,
    TransportError,
    UnreachableError,
)
from kvrdma.handshake import Identity
from kvrdma.plan import BlockSpan, TokenRange
from kvrdma.reference import PullReference, groups_of, spans_of
from kvrdma.sidechannel import Endpoint
from kvrdma.testing import FakeClock, Fault
from kvrdma.transport import open_transport
from tests.helpers.faulty_pair import MODEL, WORD, Scene, until
from tests.helpers.tagged import SMALL, Side, TaggedCache, busy, done, failed


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


# Arguments and references

NO_BLOCKS: tuple[Any, ...] = (
    *(["a"], [1.5], [[1], 2], [BlockSpan([2]), 2], [True, 5], [1 << 40], [None], [{1}], [BlockSpan(cast(Any, None))]),
    *({1}, {1: 2}, b"1", np.array(1), 1),
)


def test_what_pull_refuses_at_once(scene: Scene) -> None:
    engine, reference = scene.rank.engine, scene.publish()
    for blocks in NO_BLOCKS:
        with pytest.raises(PlanError, match="block ids must be"):
            engine.pull(1, reference, blocks)
    for first in ("x", 1.5, None):
        with pytest.raises(PlanError, match="first of a block span must be a whole number"):
            engine.pull(1, reference, [BlockSpan([1], first)])  # type: ignore[arg-type]
    for tokens in (5, (0, 4), iter([TokenRange(0, 4)])):
        with pytest.raises(PlanError, match="tokens must be a TokenRange"):
            engine.pull(1, reference, [0], tokens=tokens)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"tokens .* of 12 published"):
        engine.pull(1, reference, [0], tokens=TokenRange(0, 13))
    huge = {**reference.to_params(), "remote_num_tokens": 1 << 50}  # would be terabytes of page numbers
    with pytest.raises(PlanError, match=r"do not fit blocks for 12 of them"):
        engine.pull(1, huge, [0, 1, 2])
    for broken in ({}, {**reference.to_params(), "remote_port": 0}, {**reference.to_params(), "kvrdma": None}):
        with pytest.raises(MessageError, match="kv_transfer_params"):
            engine.pull(1, broken, [0])
    until(lambda: busy(engine) == {})


def test_block_ids_are_taken_from_many_kinds_of_lists_and_copied() -> None:
    ids = [3, 1]
    given: Any = [BlockSpan(ids, 2), [4], BlockSpan(np.array([5]))]
    spans = spans_of(given)
    ids[0] = 7
    assert [(list(span.ids), span.first) for span in spans] == [([3, 1], 2), ([4], 0), ([5], 0)]
    for flat in (range(2), np.arange(2), [np.int64(0), 1], (0, 1)):
        assert groups_of(flat) == ((0, 1),)  # type: ignore[arg-type]
    assert groups_of(np.arange(4).reshape(2, 2)) == ((0, 1), (2, 3))  # type: ignore[arg-type]
    assert groups_of([]) == ((),)
    assert groups_of([[], [1]]) == ((), (1,))


def test_what_publish_refuses(scene: Scene) -> None:
    with pytest.raises(PlanError, match="hold at most 8 tokens, 9 are to be published"):
        scene.sender.engine.publish(1, [0, 1], 9)
    with pytest.raises(PlanError, match="1 groups of blocks, 2 first_blocks"):
        scene.sender.engine.publish(1, [0, 1], 8, first_blocks=(0, 1))
    with pytest.raises(PlanError, match="is not one of 16 blocks"):
        scene.sender.engine.publish(1, [-1], 4)
    with pytest.raises(PlanError, match="num_tokens -4 must not be negative"):
        scene.sender.engine.publish(1, [1], -4)
    assert scene.sender.engine.stats()["leases"] == 0


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"remote_block_ids": [[8, 6]]}, PlanError, "needs remote page 2"),
        ({"remote_block_ids": [[8, 6, 99]]}, PlanError, "remote page 99 is outside"),
        ({"remote_block_ids": [[8, 8, 8]]}, PlanError, "remote page 8 appears twice"),
        ({"remote_engine_id": "other"}, IncompatibleError, "engine other is asked for"),
        ({"tp_size": 2}, IncompatibleError, r"has no ranks \[\(0, 1\)\]"),
        ({"tp_size": 1 << 20}, IncompatibleError, "an engine of 1048576 ranks, more than 4096"),
        ({"interleave": 4}, IncompatibleError, "interleave differs: reference 4, rank .* 1: the reference was altered"),
        ({"slot": 1 << 30}, PullError, "lease slot 1073741824, which rank .* does not have"),
        ({"engine_generation": 17}, IncompatibleError, "was restarted: .* of 17"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_reference_that_was_tampered_with_harms_nobody(
    scene: Scene, change: dict[str, Any], kind: type[Exception], text: str
) -> None:
    reference = scene.publish()
    params = reference.to_params()
    ours = {key: value for key, value in change.items() if key in params["kvrdma"]}
    params |= {key: value for key, value in change.items() if key in params}
    params["kvrdma"] |= ours
    event = failed(scene.rank.pull(1, params, [0, 1, 2]))
    assert isinstance(event.reason, kind)
    assert re.search(text, str(event.reason))
    assert event.attempts == 1
    done(scene.rank.pull(2, scene.publish(2, [2]), [3]))
    assert scene.rank.engine.stats()["peers_lost"] == 0
    until(lambda: busy(scene.rank.engine) == {})


# Peers


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"model": "other"}, "model differs: local 'other', rank .* 'tagged'"),
        ({"model": "tagged", "weights": "sha"}, r"weights differs: local 'sha', .* '\(not given\)'"),
        ({}, r"model differs: local '\(not given\)'"),
    ],
)
def test_incompatible_facts_are_named(facts: dict[str, str], text: str) -> None:
    with Side(MODEL) as producer, Side(MODEL, facts=facts or {"x": "y"}) as consumer:
        event = failed(consumer.ranks[0].pull(1, producer.publish(1, [1], 4), [2]))
        assert isinstance(event.reason, IncompatibleError)
        if facts:
            assert re.search(text, str(event.reason))
        until(lambda: busy(consumer.ranks[0].engine) == {})


def test_incompatible_layouts_are_named() -> None:
    with Side(replace(MODEL, heads=8).split(tp_size=1)) as producer, Side(MODEL) as consumer:
        event = failed(consumer.ranks[0].pull(1, producer.publish(1, [1], 4), [2]))
        assert "kv heads" in str(event.reason)


@pytest.mark.parametrize(
    ("allow", "works"),
    [(("127.0.0.1",), True), (("127.0.0.0/8", "10.0.0.1"), True), (("10.0.0.0/8",), False), (("example",), False)],
)
def test_the_allowlist(allow: tuple[str, ...], works: bool) -> None:
    with Side(MODEL) as producer, Side(MODEL, config=replace(SMALL, allow_peers=allow)) as consumer:
        event = consumer.ranks[0].pull(1, producer.publish(1, [1], 4), [2])
        if works:
            done(event)
        else:
            assert isinstance(failed(event).reason, ConfigError)
            assert "KVRDMA_ALLOW_PEERS" in str(failed(event).reason)
            assert producer.ranks[0].engine._server.counts.answered == 0


@pytest.mark.parametrize(
    ("theirs", "ours"), [("a" * 16, "b" * 16), ("a" * 16, None), (None, "b" * 16)], ids=["wrong", "none", "surplus"]
)
def test_secrets_that_differ(theirs: str | None, ours: str | None) -> None:
    with (
        Side(MODEL, config=replace(SMALL, secret=theirs)) as producer,
        Side(MODEL, config=replace(SMALL, secret=ours)) as consumer,
    ):
        event = failed(consumer.ranks[0].pull(1, producer.publish(1, [1], 4), [2]))
        assert isinstance(event.reason, AuthenticationError | UnreachableError)
        until(lambda: busy(consumer.ranks[0].engine) == {})
        assert producer.ranks[0].engine.stats()["leases"] == 1


def test_the_breaker_opens_and_pulls_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config, clock = replace(SMALL, breaker_threshold=2, breaker_cooldown_s=3.0), FakeClock()

    def on_that_clock(name: str, cooldown_s: float, threshold: int, window_s: float, _: object) -> CircuitBreaker:
        return CircuitBreaker(name, cooldown_s, threshold, window_s, clock)

    monkeypatch.setattr("kvrdma.engine.peers.CircuitBreaker", on_that_clock)
    with Side(MODEL, config=config) as producer, Side(MODEL, config=config) as consumer:
        rank, reference = consumer.ranks[0], producer.publish(1, [1], 4)
        with monkeypatch.context() as patch:

            def unreachable(_: PullReference) -> PeerEngine:
                raise UnreachableError("the network is down")

            patch.setattr(rank.engine._peers, "_connect", unreachable)
            for number in range(2):
                assert isinstance(failed(rank.pull(number, reference, [2])).reason, UnreachableError)
        clock.advance(2.9)
        event = failed(rank.pull(3, reference, [2]))
        assert isinstance(event.reason, PeerUnavailableError)
        assert "failed repeatedly" in str(event.reason)
        assert rank.engine.stats()["handshakes"] == 2, "the producer can be reached again, but it was not asked"
        clock.advance(0.1)
        done(rank.pull(4, reference, [2]))  # the probe; it closes the breaker
        done(rank.pull(5, producer.publish(2, [3], 4), [4]))


@pytest.mark.parametrize("altered", [{"port": 1}, {"host": "127.0.0.9"}, {"tp_size": 64}, {"pp_size": 2}], ids=str)
def test_references_that_lead_nowhere_are_not_held_against_the_engine_they_name(altered: dict[str, Any]) -> None:
    config = replace(SMALL, breaker_threshold=1, breaker_cooldown_s=3600)
    with Side(MODEL, config=config) as producer, Side(MODEL, config=config) as consumer:
        rank, reference = consumer.ranks[0], producer.publish(1, [1], 4)
        nowhere = msgspec.structs.replace(reference, **altered)
        for number in range(3):
            assert isinstance(failed(rank.pull(number, nowhere, [2])).reason, KVRDMAError)
        done(rank.pull(3, reference, [2]))
        failed(rank.pull(4, nowhere, [3]))
        assert rank.engine.stats()["peers"] == 1  # the connection that works stays


def test_a_handshake_with_a_silent_listener_holds_up_nobody_else() -> None:
    config = replace(SMALL, control_timeout_s=3600, pull_timeout_s=3600)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Side(MODEL) as producer,
        Side(MODEL, config=config) as consumer,
    ):
        rank, reference = consumer.ranks[0], producer.publish(1, [1], 4)
        rank.engine.pull("never", msgspec.structs.replace(reference, port=silent.getsockname()[1]), [2])
        done(rank.pull("good", reference, [3]))
        rank.engine.abort("never")
        assert isinstance(failed(rank.wait_for()[0]).reason, PullAbortedError)


def test_many_pulls_on_one_broken_connection_are_one_failure(scene: Scene) -> None:
    """With a threshold of 3, ten pulls that fail together must not open the breaker."""
    references = [scene.publish(n, [n]) for n in range(10)]
    scene.fault.inject(*[WORD, Fault.LATE] * 10)
    for number, reference in enumerate(references):
        scene.rank.engine.pull(number, reference, [number])
        until(partial(lambda count: len(scene.fault._held) == count, number + 1))
    peer = scene.rank.engine._peers.ready()[0]
    scene.rank.engine._loop.run(lambda: scene.rank.engine._peers.drop(peer, blame=True))
    assert all(done(event).attempts == 2 for event in scene.rank.wait_for(10))


def test_a_lost_peer_is_forgotten_and_found_again() -> None:
    with Side(MODEL, "p") as producer, Side(MODEL) as consumer:
        rank = consumer.ranks[0]
        done(rank.pull(1, producer.publish(1, [1], 4), [2]))
        reference = producer.publish(2, [1], 4)
        producer.ranks[0].engine._opened[0].close()
        event = failed(rank.pull(2, reference, [3]))
        assert isinstance(event.reason, TransportError | PeerLostError)
        assert rank.engine.stats()["peers"] == 0
        until(lambda: busy(rank.engine) == {})


def test_a_bind_failure_and_what_it_leaves() -> None:
    with Side(MODEL) as producer:
        port = producer.ranks[0].engine.endpoint.port
        with pytest.raises(ConfigError, match=rf"cannot listen at 127.0.0.1:{port}.*process \d+ \(.*this process"):
            Side(MODEL, config=replace(SMALL, bind=f"127.0.0.1:{port}"))


def test_a_follower_without_its_leader_leaves_nothing_behind() -> None:
    cache = TaggedCache(MODEL)
    before = threading.active_count()
    with pytest.raises(UnreachableError):
        Engine(
            cache.tensors,
            cache.specs(),
            Identity("x", MODEL.shape),
            replace(SMALL, control_timeout_s=0.2),
            transports=[open_transport("memory")],
            leader=Endpoint("127.0.0.1", 1),
        )
    until(lambda: threading.active_count() <= before)


@pytest.mark.parametrize(("region", "start", "has"), [(0, 32760, 32768), (1, 0, 0), (1 << 40, 0, 0)])
def test_digests_of_bytes_that_are_not_there_are_refused(scene: Scene, region: int, start: int, has: int) -> None:
    layout = scene.sender.engine.layout
    assert [each.nbytes for each in layout.regions] == [32768]
    says = f"no bytes {start} to {start + 64} of region {region}, which has {has}, of 1 regions"
    with pytest.raises(MessageError, match=says):
        answer_digests(layout, np.array([region, start, 64], "<u8").tobytes())


@pytest.mark.parametrize("ended", [False, True])
def test_digests_name_a_difference(ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not one that comes of blocks which were used again: the link is as good as it was."""
    scene = Scene(replace(SMALL, verify="digest"))
    reference = scene.publish()

    def compare_after_a_change(ask: Ask, pull: Pull) -> DataError | None:
        scene.rank.cache.tensors["layer1"][1, 0, 0, 3] ^= 1  # what a bad link does
        differs = compare_digests(ask, pull)
        if ended:
            scene.sender.engine.withdraw(1)
        return differs

    monkeypatch.setattr("kvrdma.engine.consumer.compare_digests", compare_after_a_change)
    event = failed(scene.rank.pull(1, reference, [0, 1, 2]))
    until(lambda: busy(scene.rank.engine) == {})
    if ended:
        assert isinstance(event.reason, LeaseRevokedError)
        scene.close()
        return
    assert isinstance(event.reason, DataError)
    assert re.search(r"1 of 4 rows from rank \(0, 0\) by memory .* differ from the producer's bytes", str(event.reason))
    scene.close()
