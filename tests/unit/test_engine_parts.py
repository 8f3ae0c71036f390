"""The engine's small parts: loop and timers, background threads, reports, sparing warnings."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import pytest

from kvrdma.engine.background import Background
from kvrdma.engine.events import End, Ended, Event, PullDone, PullFailed, PullReleased
from kvrdma.engine.loop import Loop
from kvrdma.engine.peers import Sparing
from kvrdma.engine.reports import Promise, Reports
from kvrdma.engine.signal import Signal
from kvrdma.errors import PullAbortedError, PullError, TransportClosedError
from kvrdma.handshake import preference
from kvrdma.testing import FakeClock
from kvrdma.transport import Capabilities, Completion, Transport


def ignore(transport: Transport, completion: Completion) -> None:
    del transport, completion


def test_timers_run_in_order_once_and_not_when_cancelled() -> None:
    clock, ran = FakeClock(), list[str]()
    loop = Loop([], clock)
    loop.after(2, lambda: ran.append("second"))
    loop.after(1, lambda: ran.append("first"))
    gone = loop.after(1, lambda: ran.append("never"))
    gone.cancel()
    gone.cancel()
    assert loop.timers == 2
    loop.step(0, ignore)
    assert ran == []
    clock.advance(2)
    loop.step(0, ignore)
    loop.step(0, ignore)
    assert ran == ["first", "second"]
    assert loop.timers == 0


def test_who_never_stops_asking_does_not_keep_the_loop_from_the_transports() -> None:
    loop, asked, collected = Loop([], FakeClock()), [0], [0]

    def again() -> None:
        asked[0] += 1
        if asked[0] < 100:
            loop.run(again)

    def collect(take: object) -> None:
        del take
        collected[0] += 1

    loop.collect = collect  # type: ignore[method-assign]
    loop.run(again)
    while asked[0] < 100:
        loop.step(0, ignore)
        assert collected[0] == asked[0], "once for each that asked"


def test_cancelled_timers_are_let_go_of() -> None:
    """What a timer holds must not live until it would have run: 20,000 pulls with 60 s each."""
    loop = Loop([], FakeClock())
    for _ in range(5000):
        loop.after(60, lambda: None).cancel()
    assert loop.timers == 0
    assert len(loop._timers) <= 65


def test_a_timer_may_cancel_another_that_is_due() -> None:
    clock, ran = FakeClock(), list[str]()
    loop = Loop([], clock)
    second = loop.after(2, lambda: ran.append("second"))
    loop.after(1, second.cancel)
    clock.advance(5)
    loop.step(0, ignore)
    assert ran == []


def test_work_from_other_threads_wakes_the_loop() -> None:
    loop, ran = Loop([], time.monotonic), threading.Event()
    threading.Timer(0.05, lambda: loop.run(ran.set)).start()
    began_s = time.monotonic()
    while not ran.is_set():
        loop.step(10, ignore)
    assert time.monotonic() - began_s < 5


def test_what_is_for_afterwards_runs_after_another_wait_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    loop, ran = Loop([], time.monotonic), list[str]()

    def finish() -> None:
        loop.afterwards(lambda: ran.append("told"))
        loop.afterwards(lambda: ran.append(str(1 // 0)))
        loop.afterwards(lambda: ran.append("told, too"))
        ran.append("finished")

    loop.run(finish)
    loop.step(10, ignore)
    assert ran == ["finished"]
    loop.run(lambda: ran.append("asked meanwhile"))
    began_s = time.monotonic()
    loop.step(10, ignore)
    assert ran[1:] == ["asked meanwhile", "told", "told, too"]
    assert time.monotonic() - began_s < 5
    assert "ZeroDivisionError" in caplog.text
    loop.afterwards(lambda: ran.append("at the end"))
    loop.finish()
    assert ran[-1] == "at the end"
    assert loop.timers == 0


def test_background_keeps_its_limit_and_leaves_no_thread() -> None:
    before, together, most = threading.active_count(), [0], [0]
    lock, background = threading.Lock(), Background("test", 3)
    done = threading.Semaphore(0)

    def work() -> None:
        with lock:
            together[0] += 1
            most[0] = max(most[0], together[0])
        time.sleep(0.01)
        with lock:
            together[0] -= 1
        done.release()

    for _ in range(20):
        background.run(work)
    for _ in range(20):
        assert done.acquire(timeout=10)
    assert most[0] == 3
    deadline_s = time.monotonic() + 5
    while len(background) or threading.active_count() > before:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    background.run(work)  # starts a thread anew
    assert done.acquire(timeout=10)
    background.close(1)
    background.run(work)
    assert not done.acquire(timeout=0.1)


def test_a_closed_background_drops_what_waits() -> None:
    background, go, ran = Background("test", 1), threading.Event(), list[int]()

    def first() -> None:
        go.wait(10)

    def job(number: int) -> Callable[[], None]:
        return lambda: ran.append(number)

    background.run(first)
    for number in range(3):
        background.run(job(number))
    closer = threading.Timer(0.05, go.set)
    closer.start()
    background.close(5)
    assert ran == []
    assert len(background) == 0


def test_reports_owe_each_pull_one_end() -> None:
    reports = Reports()
    reports.owe("a", Promise())
    with pytest.raises(PullError, match="'a' is under way"):
        reports.owe("a", Promise())
    why = PullAbortedError("why")
    reports.add(PullFailed("a", why, 1, quarantined=True))
    with pytest.raises(PullError):
        reports.owe("a", Promise())  # its blocks may still be written
    reports.add(PullReleased("a"))
    reports.owe("a", Promise())
    reports.owe("b", Promise())
    reports.add(PullFailed("b", why, 1, quarantined=True))
    reports.add(Ended("r", End.DONE))
    reports.close()
    reports.fail_the_rest(why)
    events = reports.wait(1)
    assert [(type(event).__name__, event.request_id) for event in events] == [
        ("PullFailed", "a"),
        ("PullReleased", "a"),
        ("PullFailed", "b"),
        ("Ended", "r"),
        ("PullFailed", "a"),
    ]
    with pytest.raises(TransportClosedError):
        reports.owe("c", Promise())
    assert reports.poll() == []
    assert reports.wait(0.01) == []


def test_reports_wait_for_nobody_who_is_in_the_middle_of_a_promise() -> None:
    """As a handler is that closes the engine: what it waits for may have something to report."""
    reports, took_place = Reports(), list[bool]()

    class Interrupted:
        def __hash__(self) -> int:
            other = threading.Thread(target=reports.add, args=(PullReleased("x"),), daemon=True)
            other.start()
            other.join(10)
            took_place.append(not other.is_alive())
            return 1

    reports.owe(Interrupted(), Promise())
    assert took_place == [True]
    assert reports.poll() == [PullReleased("x")]


def test_a_promise_made_while_the_engine_closes_is_taken_back_or_kept() -> None:
    why, reports, asked = PullAbortedError("why"), Reports(), [0]

    class Late:
        """Closes the reports as it is entered; if it is told to, it is failed before it can be taken back."""

        def __init__(self, *, failed: bool) -> None:
            self.failed = failed

        def __hash__(self) -> int:
            asked[0] += 1
            if asked[0] == 1:
                reports.close()
            elif asked[0] == 2 and self.failed:
                reports.fail_the_rest(why)
            return 1

    with pytest.raises(TransportClosedError):
        reports.owe(Late(failed=False), Promise())
    reports.fail_the_rest(why)
    assert reports.poll() == []
    reports, asked = Reports(), [0]
    late = Late(failed=True)
    reports.owe(late, Promise())
    assert reports.poll() == [PullFailed(late, why, attempts=0)]


def test_promises_that_are_kept_while_the_rest_fails_are_not_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    why, reports = PullAbortedError("why"), Reports()
    promises = {number: Promise() for number in range(3)}
    for number, promise in promises.items():
        reports.owe(number, promise)
    tell = reports._signal.hand_over

    def hand_over() -> None:
        monkeypatch.undo()
        reports.add(PullDone(1, 0, 0, 0, 0.0, 0.0, 0.0, 1, ()))  # another thread is faster
        tell()

    monkeypatch.setattr(reports._signal, "hand_over", hand_over)
    reports.fail_the_rest(why)
    assert sorted(str(event.request_id) for event in reports.poll()) == ["0", "1", "2"]


class Racing(deque[Event]):
    """Events of which somebody else takes some between being counted and being taken."""

    def __init__(self, taken: int) -> None:
        super().__init__(PullReleased(number) for number in range(4))
        self.left, self.elsewhere = taken, list[Event]()

    def __len__(self) -> int:
        count = super().__len__()
        while self.left:
            self.left -= 1
            self.elsewhere.append(self.popleft())
        return count


@pytest.mark.parametrize("taken", range(5))
def test_what_another_thread_takes_meanwhile_is_neither_lost_nor_told_twice(taken: int) -> None:
    reports = Reports()
    reports._events = racing = Racing(taken)
    events = reports.poll()
    assert [event.request_id for event in racing.elsewhere + events] == list(range(4))


@pytest.mark.parametrize("after", ["clear", "take"])
def test_a_handler_that_raises_takes_no_event_along(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    reports = Reports()
    for number in range(3):
        reports.add(PullReleased(number))
    real = getattr(reports._signal, after)

    def interrupted() -> None:
        real()
        raise KeyboardInterrupt

    monkeypatch.setattr(reports._signal, after, interrupted)
    with pytest.raises(KeyboardInterrupt):
        reports._take(interrupted)
    monkeypatch.undo()
    assert select.select([reports], [], [], 0)[0]
    assert [event.request_id for event in reports.wait(60)] == [0, 1, 2]


def test_a_warning_that_repeats_is_said_once_per_period() -> None:
    warn = Sparing(10, limit=2)
    assert [warn("a", now) for now in (0, 5, 9.9, 10, 15)] == [True, False, False, True, False]
    assert warn("b", 15)
    assert warn("c", 15)  # and a is forgotten
    assert warn("a", 15.5)


def test_the_order_of_transports() -> None:
    def can(reach: Literal["process", "host", "network"], *, one_sided: bool, needs_cpu: bool) -> Capabilities:
        return Capabilities(frozenset({"cpu"}), reach, one_sided, needs_cpu, 1)

    found = {
        "tcp": can("network", one_sided=False, needs_cpu=True),
        "ucx": can("network", one_sided=True, needs_cpu=True),
        "verbs": can("network", one_sided=True, needs_cpu=False),
        "cma": can("host", one_sided=True, needs_cpu=False),
    }
    assert list(preference(found)) == ["cma", "verbs", "ucx", "tcp"]


def test_a_signal_wakes_all_who_wait_for_it_until_it_is_cleared() -> None:
    signal = Signal()
    waiting = [threading.Thread(target=signal.wait, args=(seconds,)) for seconds in (600.0, float("inf"))]
    for thread in waiting:
        thread.start()
    signal.set()
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()
    signal.wait(600.0)
    signal.clear()
    for seconds in (0.0, -1.0, 0.0001):  # nobody sets it: a wait without an end would hang here
        signal.wait(seconds)
    assert not select.select([signal], [], [], 0)[0]
    signal.hand_over()
    signal.wait(600.0)
    assert select.select([signal], [], [], 0)[0]


def test_who_waits_goes_on_when_another_thread_takes_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports()
    reports.add(PullReleased("taken"))
    once = reports.poll
    later = threading.Timer(0.1, lambda: reports.add(PullReleased("mine")))

    def poll() -> list[Event]:
        """The other thread is faster, the first time."""
        monkeypatch.setattr(reports, "poll", once)
        assert once() == [PullReleased("taken")]
        later.start()
        return once()

    monkeypatch.setattr(reports, "poll", poll)
    assert reports.wait(60) == [PullReleased("mine")]
    later.join()
