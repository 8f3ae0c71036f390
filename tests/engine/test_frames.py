"""Whatever arrives at an engine's side channel: it answers or counts it, stays bounded, and goes on."""

from __future__ import annotations

import pickle
import random
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrdma import wire
from kvrdma.config import Config
from kvrdma.engine import End
from kvrdma.errors import ConfigError, IncompatibleError, MessageError
from kvrdma.sidechannel import SideChannelClient
from kvrdma.wire import (
    AnnounceRank,
    DescribeRanks,
    DigestRows,
    Goodbye,
    Heartbeat,
    LeaseDone,
    Message,
    Noted,
    RankAnnounced,
    RankDescription,
    RanksDescribed,
)
from tests.helpers.tagged import Model, Side, done, ended

MODEL = Model().split(tp_size=1)
HEAD = struct.pack("<4sH", b"KVCT", wire.PROTOCOL_VERSION)


def describe(**changes: object) -> RankDescription:
    values = {
        "engine_id": "target", "generation": 1, "rank": (0, 1), "host": "h", "port": 1, "model": {}, "layout": b"",
        "offers": {}, "start": 7,
    }  # fmt: skip
    return RankDescription(**{**values, **changes})  # type: ignore[arg-type]


VALID: tuple[Message, ...] = (
    DescribeRanks("target", ((0, 0),)),
    AnnounceRank(describe()),
    LeaseDone((0, 1 << 40), "c", 0, (0, 1)),
    Heartbeat(((0, 1), (3, 1 << 61))),
    Goodbye("c", 0),
    DigestRows((0, 1), b"\0" * 48),
    Noted(3),
)


@dataclass
class Target:
    side: Side
    socket: zmq.Socket[bytes]

    def say(self, *parts: bytes) -> list[bytes]:
        self.socket.send_multipart([b"01234567", *parts])
        return self.socket.recv_multipart()

    def works(self) -> None:
        with Side(MODEL) as consumer:
            done(consumer.ranks[0].pull(1, self.side.publish(1, [1, 2], 8), [3, 4]))
            assert consumer.ranks[0].cache.wrong(1, [3, 4], range(8)) == []
        ended(self.side.ranks[0].wait_for()[0])


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    with Side(MODEL, "target") as side:
        socket.connect(side.ranks[0].engine.endpoint.url())
        yield Target(side, socket)
    context.destroy(0)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.booleans())
def test_random_frames(target: Target, junk: bytes, headed: bool) -> None:
    assert target.say((HEAD if headed else b"") + junk)
    assert target.side.ranks[0].engine._server.alive


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(VALID), st.randoms(use_true_random=False))
def test_bent_frames(target: Target, message: Message, rng: random.Random) -> None:
    frame = bytearray(wire.encode(message))
    for _ in range(rng.randint(0, 3)):
        frame[rng.randrange(6, len(frame))] ^= 1 << rng.randrange(8)
    cut = rng.choice((len(frame), rng.randint(0, len(frame))))
    assert target.say(bytes(frame[:cut]))
    assert target.side.ranks[0].engine._server.alive


LEASES = st.tuples(st.integers(0, 1 << 62), st.integers(0, 1 << 62))
RANKS = st.integers(0, 1 << 31)
MESSAGES = st.one_of(
    st.builds(LeaseDone, LEASES, st.text(max_size=256), RANKS, st.lists(RANKS, max_size=9).map(tuple), st.booleans()),
    st.builds(Heartbeat, st.lists(LEASES, max_size=20).map(tuple)),
    st.builds(Goodbye, st.text(max_size=256), RANKS),
    st.builds(DigestRows, LEASES, st.binary(max_size=100)),
    st.builds(DescribeRanks, st.just("target"), st.lists(st.tuples(RANKS, RANKS), max_size=9).map(tuple)),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MESSAGES)
def test_well_formed_messages_of_any_content(target: Target, message: Message) -> None:
    wire.decode(target.say(wire.encode(message))[1])
    assert target.side.ranks[0].engine._server.alive


def test_what_is_no_message_harms_nobody(target: Target) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (Path("/tmp/kvrdma-must-not-exist"),))

    for parts in (
        [],
        [b""],
        [pickle.dumps(Bomb())],
        [HEAD + pickle.dumps(Bomb())],
        [b"a"] * 500,
        [HEAD + b"\x91" * 9999],
    ):
        target.say(*parts) if parts else target.socket.send_multipart([b""])
    assert not Path("/tmp/kvrdma-must-not-exist").exists()
    deep = HEAD + b"\x81\xa4type" * 3000
    assert b"cannot be read" in target.say(deep)[1]
    target.say(HEAD + b"\xc6\xff\xff\xff\xff")  # a length of 4 GiB that is not there
    while target.socket.poll(200):
        target.socket.recv_multipart()
    target.works()


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)


def test_done_messages_for_unknown_leases_leave_memory_flat(target: Target) -> None:
    engine = target.side.ranks[0].engine
    frames = [wire.encode(LeaseDone((n % 4096, (1 << 60) + n), f"c{n}" * 40, 0, (0,) * 900)) for n in range(300)]
    sizes = []
    for number in range(3000):
        target.say(frames[number % 300][:-1] + bytes([number % 2 + 0xC2]))
        if number in {1500, 2999}:
            sizes.append(_resident_mb())
    assert engine.stats()["early"] <= 65_536
    assert sizes[1] - sizes[0] < 16
    target.works()


def test_frames_of_many_megabytes_are_not_kept(target: Target) -> None:
    endpoint = target.side.ranks[0].engine.endpoint
    context = zmq.Context()
    before = _resident_mb()
    for _ in range(5):
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 100)
        socket.connect(endpoint.url())
        socket.send_multipart([b"x", bytes(30 << 20)])
        time.sleep(0.05)
        socket.close()
    context.destroy(100)
    assert _resident_mb() - before < 80
    target.works()


# What the messages mean


def test_the_answers(target: Target) -> None:
    with SideChannelClient(target.side.ranks[0].engine.endpoint) as client:
        reference = target.side.publish(5, [1], 4)
        lease = (reference.lease.slot, reference.lease.generation)
        assert client.request(Heartbeat((lease, (9, 9))), 5) == Noted(1)
        assert client.request(LeaseDone(lease, "a", 0, (0, 1)), 5) == Noted(1)
        assert client.request(LeaseDone(lease, "a", 0, (0, 1)), 5) == Noted(0)  # again
        assert client.request(LeaseDone(lease, "a", 2, (0, 1)), 5) == Noted(0)  # not a reader
        assert client.request(Goodbye("a", 1), 5) == Noted(0)
        end = ended(target.side.ranks[0].wait_for()[0])
        assert (end.request_id, end.how) == (5, End.DONE)
        assert client.request(Heartbeat((lease,)), 5) == Noted(0)
        described = client.request(DescribeRanks("target", ((0, 0), (0, 0))), 5)
        assert isinstance(described, RanksDescribed)
        assert [rank.engine_id for rank in described.ranks] == ["target"] * 2
        with pytest.raises(IncompatibleError, match="engine x is asked for, engine target runs here"):
            client.request(DescribeRanks("x", ()), 5)
        with pytest.raises(MessageError, match="does not answer what is itself an answer"):
            client.request(Noted(), 5)
        with pytest.raises(ConfigError, match="makes no checksums"):
            client.request(DigestRows(lease, b""), 5)


def test_who_may_be_announced() -> None:
    model = Model().split(tp_size=2)
    with Side(model, "leader") as side, SideChannelClient(side.ranks[0].engine.endpoint) as client:
        before = side.ranks[0].engine.publish(1, [1], 4).engine_generation
        assert side.ranks[1].engine._producer.generation == before  # the follower speaks of the leader's
        for rank, text in (
            ((0, 0), "the one that was told"),
            ((0, 2), "1 stages of 2 ranks"),
            ((1, 1), "1 stages of 2"),
        ):
            with pytest.raises(MessageError, match=text):
                client.request(AnnounceRank(describe(engine_id="leader", rank=rank)), 5)
        with pytest.raises(IncompatibleError):
            client.request(AnnounceRank(describe(engine_id="other")), 5)
        with pytest.raises(MessageError, match="exceeds 1048576 bytes"):
            client.request(
                AnnounceRank(describe(engine_id="leader", model={"m" * 200 + str(n): "x" * 250 for n in range(3000)})),
                5,
            )
        answer = client.request(AnnounceRank(describe(engine_id="leader", start=8)), 5)
        assert isinstance(answer, RankAnnounced)
        assert (answer.ranks, answer.generation != before) == (2, True)  # a rank has restarted: another engine
        again = client.request(AnnounceRank(describe(engine_id="leader", start=8)), 5)
        assert again == answer


def test_digests_stay_within_the_regions() -> None:
    config = Config(verify="digest")
    with Side(MODEL, "digest", config=config) as side, SideChannelClient(side.ranks[0].engine.endpoint) as client:
        for rows in ([9, 0, 8], [0, 1 << 62, 8], [0, 0, 1 << 40], [0, (1 << 64) - 1, 1]):
            with pytest.raises(MessageError, match="no bytes"):
                client.request(DigestRows((0, 1), struct.pack("<3Q", *rows)), 5)
        with pytest.raises(MessageError, match="7 bytes of rows"):
            client.request(DigestRows((0, 1), b"1234567"), 5)
