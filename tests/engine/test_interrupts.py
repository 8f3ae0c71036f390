"""What runs in the middle of a call (a handler that raises or calls the engine, a finalizer), and a lack of threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from kvrdma.engine import Ended, PullDone, PullFailed
from kvrdma.engine.loop import Loop
from kvrdma.errors import ConfigError, TransportClosedError
from kvrdma.lease import End, FenceTable, LeaseKey
from kvrdma.plan import TokenRange
from tests.helpers.tagged import SMALL, Model, Side, busy, done, failed

MODEL = Model(layers=2, block=4, blocks=16)

PROGRAM = """
import random, signal, sys, threading
import numpy as np
from kvrdma.config import Config
from kvrdma.engine import Engine
from kvrdma.handshake import Identity
from kvrdma.page_format import LayerSpec
from kvrdma.topology import EngineShape

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
spec = LayerSpec(heads=(0, 2), total_heads=2, block_size=16, dims="BHNC")
cache, rng, number = np.zeros((8, 2, 16, 64), np.uint8), random.Random(1), 0
engine = Engine({"l": cache}, spec, Identity("p", EngineShape(1, 2)), Config(transports=("memory",)))
for _ in range(400):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + 0.002 * rng.random())
        for _ in range(5000):  # far longer than that; one that a finalizer meets is ignored
            number += 1
            engine.publish(number, [1], 16)
            engine.withdraw(number)
            engine.poll()
    except KeyboardInterrupt:
        pass
ended = threading.Thread(target=engine.close, daemon=True)
ended.start()
ended.join(60)
print(number > 400, ended.is_alive())
"""


def test_interrupts_leave_no_lock_taken() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout, ended.returncode) == ("True False\n", 0), ended.stderr


def in_the_middle_of_publish(patch: pytest.MonkeyPatch, what: Callable[[], object]) -> None:
    """Let something run once while the producer's lock is held."""
    real, left = FenceTable.make_live, [what]

    def make_live(table: FenceTable, key: LeaseKey) -> None:
        real(table, key)
        if left:
            left.pop()()

    patch.setattr(FenceTable, "make_live", make_live)


def within(seconds: float, work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for itself"


def test_a_handler_may_close_the_engine_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with Side(MODEL) as side:
        engine = side.ranks[0].engine
        in_the_middle_of_publish(monkeypatch, engine.close)
        within(60, lambda: engine.publish("a", [1], 4))
        with pytest.raises(TransportClosedError):
            engine.publish("b", [1], 4)


def test_a_finalizer_may_withdraw_in_the_middle_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Request:
        """Something in a cycle, which only the collector finds."""

        def __init__(self) -> None:
            self.me = self

    with Side(MODEL) as side:
        engine = side.ranks[0].engine
        engine.publish("old", [1], 4)
        request = Request()
        weakref.finalize(request, engine.withdraw, "old")
        del request
        in_the_middle_of_publish(monkeypatch, gc.collect)
        within(60, lambda: engine.publish("new", [2], 4))
        assert [event.request_id for event in engine.poll()] == ["old"]
        assert engine.withdraw("new")
        assert engine.stats()["leases"] == 0


def test_a_handler_may_close_the_engine_in_the_middle_of_withdraw(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FenceTable.revoke
    with Side(MODEL) as side:
        engine = side.ranks[0].engine
        left = [engine.close]

        def revoke(table: FenceTable, key: LeaseKey) -> None:
            real(table, key)
            if left:
                left.pop()()

        engine.publish("a", [1], 4)
        monkeypatch.setattr(FenceTable, "revoke", revoke)
        assert engine.withdraw("a")
        assert engine.poll() == [Ended("a", End.WITHDRAWN)]


@pytest.mark.parametrize("asked", [False, True])
def test_a_pull_that_a_handler_interrupts_is_over(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    """Before the loop was asked nothing has begun, and nothing is reported; afterwards it ends as any other."""
    real = Loop.run
    with Side(MODEL) as producer, Side(MODEL, name="consumer") as consumer:
        engine = consumer.ranks[0].engine
        reference = producer.publish(1, [1], 4)
        left = [KeyboardInterrupt]

        def run(loop: Loop, work: Callable[[], object]) -> None:
            raising = left and loop is engine._loop
            if asked or not raising:
                real(loop, work)
            if raising:
                raise left.pop()

        monkeypatch.setattr(Loop, "run", run)
        with pytest.raises(KeyboardInterrupt):
            engine.pull("p", reference, [2])
        events = engine.wait(30 if asked else 0.2)
        assert [(type(event), event.request_id) for event in events] in (
            ([(PullDone, "p")], [(PullFailed, "p")]) if asked else ([],)
        )
        done(consumer.ranks[0].pull("p", producer.publish(2, [1], 4), [2]))


def test_sizes_are_those_of_rest_when_the_end_is_told() -> None:
    with Side(MODEL) as producer, Side(MODEL, name="consumer") as consumer:
        engine = consumer.ranks[0].engine
        for number in range(50):
            reference = producer.publish(number, [1], 4)
            engine.hold(number, reference)
            engine.pull(number, reference, [2], tokens=TokenRange(0, 0 if number % 2 else 4))
            assert [type(event) for event in engine.wait(30)] == [PullDone]
            assert busy(engine) == {}


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_pull_fails_alone_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with Side(MODEL) as producer, Side(MODEL, name="reader") as consumer:
        rank = consumer.ranks[0]
        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", no_thread)
            for number in range(5):  # more than the breaker takes
                event = failed(rank.pull(number, producer.publish(number, [1], 4), [3]))
                assert isinstance(event.reason, ConfigError)
                assert "'kvrdma handshake' cannot be started: can't start new thread; raise" in str(event.reason)
        done(rank.pull(99, producer.publish(99, [1], 4), [3]))
        assert {key: value for key, value in busy(rank.engine).items() if key != "renewed"} == {}


def test_an_engine_that_gets_no_thread_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = threading.Thread.start, 0

    def start(thread: threading.Thread) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("can't start new thread")
        real(thread)

    before = set(threading.enumerate())
    for count in range(5):
        left = count
        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", start)
            with pytest.raises(ConfigError, match="can't start new thread"):
                Side(MODEL, config=SMALL)
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
        assert set(threading.enumerate()) <= before
