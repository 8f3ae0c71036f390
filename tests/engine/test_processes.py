"""Two processes: what is killed, frozen, restarted, silent or strange on the other side, and what it costs others."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from kvrdma.config import Config
from kvrdma.engine import PullFailed
from kvrdma.errors import ControlError, IncompatibleError, KVRDMAError, PullTimeoutError, TransportError
from kvrdma.reference import PullReference
from kvrdma.sidechannel import Endpoint, SideChannelClient
from kvrdma.testing import PeerProcess
from kvrdma.wire import Noted
from tests.engine import chaos, soak
from tests.helpers import producer_process as at
from tests.helpers.ports import fixed_port
from tests.helpers.tagged import SMALL, Model, Side, busy, done, failed

MODEL = Model(layers=4, block=16, blocks=64)
BRIEF = replace(SMALL, pull_timeout_s=4.0, control_timeout_s=2.0)

each_transport = pytest.mark.parametrize(
    "transport",
    [pytest.param("cma", marks=pytest.mark.needs("cma")), pytest.param("ucx", marks=pytest.mark.needs("ucx"))],
)


@contextmanager
def producing(transport: str, config: Config = SMALL, name: str = "producer") -> Iterator[tuple[PeerProcess, int]]:
    process, port = at.start(MODEL, name, transport, config)
    try:
        yield process, port
    finally:
        process.kill()


@each_transport
def test_requests_move_between_processes(transport: str) -> None:
    with producing(transport) as (process, _), Side(MODEL, transport=transport) as consumer:
        rank = consumer.ranks[0]
        for number, params in process.call(at.publish, 5, 3, 0):
            event = done(rank.pull(number, params, [9, 3, 7]))
            assert event.via[0].startswith(transport)
            assert rank.cache.wrong(number, [9, 3, 7], range(params["remote_num_tokens"])) == []
            rank.cache.poison()
        deadline_s = time.monotonic() + 10
        while process.call(at.ends) != {"DONE": 5, "live": 0, "free": 64}:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@each_transport
def test_the_first_pull_after_a_restart_on_the_same_port_works(transport: str) -> None:
    with Side(MODEL, transport=transport) as consumer:
        rank = consumer.ranks[0]
        bind = replace(SMALL, bind=f"127.0.0.1:{fixed_port()}")
        with producing(transport, bind) as (process, port):
            (_, old), (_, unused) = process.call(at.publish, 2, 3, 0)
            done(rank.pull("old", old, [0, 1, 2]))
        with producing(transport, bind) as (process, again):
            assert again == port
            ((number, new),) = process.call(at.publish, 1, 3, 7)
            event = done(rank.pull("new", new, [3, 4, 5]))
            assert event.attempts == 1
            assert rank.cache.wrong_rows(number, [3, 4, 5], range(new["remote_num_tokens"])) == 0
            late = failed(rank.pull("late", unused, [6, 7, 8]))
            assert isinstance(late.reason, IncompatibleError)
            assert "was restarted" in str(late.reason)
            assert at.is_poison(rank.cache.store, [6, 7, 8])
            assert busy(rank.engine) == {}


@each_transport
def test_a_frozen_peer_is_bounded_and_well_again_when_it_thaws(transport: str) -> None:
    with producing(transport) as (process, _), Side(MODEL, transport=transport, config=BRIEF) as consumer:
        rank = consumer.ranks[0]
        (warm, first), (_, second), (third, last) = process.call(at.publish, 3, 3, 0)
        done(rank.pull(warm, first, [0, 1, 2]))
        process.signal(signal.SIGSTOP)
        began_s = time.monotonic()
        rank.engine.pull("frozen", second, [3, 4, 5])
        event = rank.wait_for()[0]
        assert time.monotonic() - began_s < 4 + 5 + 10
        if transport == "ucx":  # cma does not need the frozen process at all
            assert isinstance(failed(event).reason, PullTimeoutError | TransportError)
        else:
            done(event)
        process.signal(signal.SIGCONT)
        done(rank.pull(third, last, [6, 7, 8], timeout_s=20))
        deadline_s = time.monotonic() + 10
        while busy(rank.engine):
            assert time.monotonic() < deadline_s, busy(rank.engine)
            time.sleep(0.02)


@each_transport
def test_a_peer_killed_amid_reads_and_close_within_five_seconds(transport: str) -> None:
    model = replace(MODEL, layers=8, blocks=1024)
    process, _ = at.start(model, "producer", transport, SMALL)
    with Side(model, transport=transport) as consumer:
        rank = consumer.ranks[0]
        ((number, params),) = process.call(at.publish, 1, 1024, 0)
        rank.engine.pull(number, params, range(1024))
        while rank.engine.stats()["reads"] == 0 and not rank.engine.poll():
            time.sleep(0.0005)
        process.kill()
        began_s = time.monotonic()
        rank.engine.close()
        assert time.monotonic() - began_s < 5
        assert busy(rank.engine) == {}


# Strange peers


SAYS = {
    "garbage": os.urandom(4096),
    "strange greeting": b"\xff\0\0\0\0\0\0\0\1\x7f\3\0" + b"STRANGE".ljust(52, b"\0"),
    "half a frame": b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL",
}


@contextmanager
def listening(kind: str) -> Iterator[int]:
    """A TCP port that accepts and then behaves badly."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                    kept.append(connection)
                    connection.sendall(SAYS.get(kind, b""))
                    if kind == "closes":
                        connection.close()
                except OSError:
                    if server.fileno() < 0:
                        return

        if kind == "refused":
            server.close()
            yield port
            return
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield port
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(5)
        for connection in kept:
            connection.close()


@pytest.mark.parametrize("kind", ["black hole", "refused", "garbage", "strange greeting", "half a frame", "closes"])
def test_whatever_answers_is_bounded_and_named(kind: str) -> None:
    with listening(kind) as port, Side(MODEL) as producer, Side(MODEL, config=BRIEF) as consumer:
        rank, reference = consumer.ranks[0], producer.publish(1, [1], 16)
        began_s = time.monotonic()
        event = failed(rank.pull(1, msgspec.structs.replace(reference, port=port), [2]))
        assert time.monotonic() - began_s < 2 + 10
        assert isinstance(event.reason, ControlError)
        assert f"127.0.0.1:{port}" in str(event.reason)
        assert busy(rank.engine) == {}
        done(rank.pull(2, reference, [2], timeout_s=20))


@pytest.mark.parametrize("kind", ["garbage", "strange greeting", "half a frame", "closes"])
def test_a_connection_that_has_failed_before_the_question_does_not_block_it(kind: str) -> None:
    with listening(kind) as port, SideChannelClient(Endpoint("127.0.0.1", port)) as client:
        time.sleep(0.3)  # the handshake of ZMQ has failed for good by now
        began_s = time.monotonic()
        with pytest.raises(ControlError):
            client.request(Noted(), 0.8)
        assert time.monotonic() - began_s < 5


def _times(side: Side, references: list[PullReference]) -> list[float]:
    times = []
    for number, reference in enumerate(references):
        times.append(done(side.ranks[0].pull(number, reference, [number % 8])).elapsed_s)
    return times


def test_healthy_pulls_beside_black_holes_are_not_slowed() -> None:
    with listening("black hole") as port, Side(MODEL) as producer, Side(MODEL, config=BRIEF) as consumer:
        rank = consumer.ranks[0]
        done(rank.pull("warm", producer.publish(999, [63], 16), [63]))
        alone = _times(consumer, [producer.publish(n, [n % 8], 16, consumers=9) for n in range(50)])
        reference = producer.publish(99, [9], 16)
        for number in range(20):  # as many engines that never answer
            bad = msgspec.structs.replace(reference, port=port, engine_id=f"hole {number}")
            rank.engine.pull(f"hole {number}", bad, [20 + number])
        beside = _times(consumer, [producer.publish(100 + n, [n % 8], 16, consumers=9) for n in range(50)])
        holes = rank.wait_for(20)
        assert all(isinstance(event, PullFailed) and isinstance(event.reason, KVRDMAError) for event in holes)
        assert sorted(beside)[25] < 2 * sorted(alone)[25] + 0.002
        assert max(beside) < 2 * max(alone) + 0.1  # what a busy machine adds to a single one
        assert busy(rank.engine) == {}


# The long runs, short


@each_transport
def test_chaos(transport: str) -> None:
    seen = chaos.run(transport, rounds=2, seed=5)
    assert isinstance(seen["PullDone"], int)
    assert seen["PullDone"] > 5


def test_soak() -> None:
    grown = soak.run("memory", pulls=1000)
    assert grown["wrong_rows"] == 0
    assert grown["fds_grown"] <= 0  # less: what earlier tests had left was collected
    assert grown["threads_grown"] == 0
    assert isinstance(grown["rss_grown_mb"], float)
    assert grown["rss_grown_mb"] < 8


@pytest.mark.needs("cma")
def test_late_readers_of_blocks_that_are_reused_at_once() -> None:
    seen = soak.stress("cma", pulls=300, seed=1)
    assert seen["wrong_rows"] == 0
    assert seen["done"] > 20
    assert seen["LeaseRevokedError"] > 20
    assert seen["other"] == 0
