"""The data thread's loop: what others ask of it, what is due, what the transports report."""

from __future__ import annotations

import heapq
import itertools
import logging
import select
from collections import deque
from collections.abc import Callable, Sequence

from kvrdma.engine.background import Work
from kvrdma.engine.process import ProcessLock
from kvrdma.engine.signal import Signal
from kvrdma.transport import Completion, Transport

_log = logging.getLogger(__name__)
_COMPACT_AT = 64
_AFTERWARDS_S = 0.001


class Timer:
    """Something to run later; ``cancel`` lets go of it at once."""

    __slots__ = ("_loop", "run")

    def __init__(self, loop: Loop, run: Work) -> None:
        self._loop = loop
        self.run: Work | None = run

    def cancel(self) -> None:
        """Do not run it. Idempotent."""
        if self.run is not None:
            self.run = None
            self._loop.forget()


class Loop:
    """Runs everything in the thread that calls ``step``; only ``run`` may be called from others."""

    def __init__(self, transports: Sequence[Transport], clock: Callable[[], float]) -> None:
        """Watch ``transports``; ``clock`` gives seconds, monotonic."""
        self._transports = list(transports)
        self._clock = clock
        self._work: deque[Work] = deque()
        self._later: deque[Work] = deque()
        self._process = ProcessLock()
        self._asked = Signal()
        self._poller = select.poll()
        for fd in (self._asked.fileno(), *(transport.fileno() for transport in self._transports)):
            self._poller.register(fd, select.POLLIN)
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._cancelled = 0

    def now(self) -> float:
        """Give the time in seconds."""
        return self._clock()

    def run(self, work: Work) -> None:
        """Run something in the loop's thread, soon. May be called from any thread of this process."""
        self._process.require()
        self._work.append(work)
        self._asked.set()

    def afterwards(self, work: Work) -> None:
        """Run something within a millisecond or so, after a wait for something else to do.

        Meanwhile the GIL is free for whoever was just told of something: a thread that is woken takes longer to ask for
        it than this one takes to go on, and would wait until it has done everything else. What it raises is logged.
        """
        self._later.append(work)

    def finish(self) -> None:
        """Run what was to be run afterwards."""
        self._run_later(len(self._later))

    def _run_later(self, count: int) -> None:
        for _ in range(count):
            try:
                self._later.popleft()()
            except Exception:  # noqa: BLE001 - what it follows up on has been reported
                _log.exception("the end of a pull met a defect")

    def after(self, seconds: float, run: Work) -> Timer:
        """Run something not before ``seconds`` from now."""
        timer = Timer(self, run)
        heapq.heappush(self._timers, (self._clock() + seconds, next(self._order), timer))
        return timer

    @property
    def timers(self) -> int:
        """Count the timers that wait."""
        return len(self._timers) - self._cancelled

    def forget(self) -> None:
        """Count a cancelled timer; clear them away once they are the majority."""
        self._cancelled += 1
        if len(self._timers) > _COMPACT_AT and 2 * self._cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].run is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def step(self, timeout_s: float, take: Callable[[Transport, Completion], None]) -> None:
        """Do what there is to do, after waiting for it for at most ``timeout_s`` seconds."""
        wait_s, later = min(timeout_s, self._run_timers()), len(self._later)
        if later:
            wait_s = min(wait_s, _AFTERWARDS_S)
        if self._work or self._asked.fileno() in dict(self._poller.poll(1e3 * wait_s)):
            self._asked.clear()
        for _ in range(len(self._work)):  # what is asked for meanwhile waits: others may never stop asking
            self._work.popleft()()
        self.collect(take)
        self._run_later(later)

    def collect(self, take: Callable[[Transport, Completion], None]) -> None:
        """Hand on everything the transports report now."""
        for transport in self._transports:
            for completion in transport.poll():
                take(transport, completion)

    def _run_timers(self) -> float:
        """Run what is due; returns the seconds until the next is."""
        now_s = self._clock()
        while self._timers and self._timers[0][0] <= now_s:
            timer = heapq.heappop(self._timers)[2]
            run, timer.run = timer.run, None
            if run is None:
                self._cancelled -= 1
            else:
                run()
        return max(0.0, self._timers[0][0] - self._clock()) if self._timers else float("inf")
