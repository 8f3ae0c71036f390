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
            self._loop.cancelled += 1
            if self._loop.cancelled > _COMPACT_AT:
                self._loop.compact()


class Loop:
    """Runs everything in the thread that calls ``step``; only ``run`` may be called from others."""

    def __init__(self, transports: Sequence[Transport], clock: Callable[[], float]) -> None:
        """Watch ``transports``; ``clock`` gives seconds, monotonic."""
        self._transports = list(transports)
        self.now = clock
        """Gives the time in seconds; no method of this class, because a pull asks often and waits for the answers."""
        self._work: deque[Work] = deque()
        self._later: deque[Work] = deque()
        self._process = ProcessLock()
        self._asked = Signal()
        self._poller = select.poll()
        self._asked_fd = self._asked.fileno()
        for fd in (self._asked_fd, *(transport.fileno() for transport in self._transports)):
            self._poller.register(fd, select.POLLIN)
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self.cancelled = 0
        """Timers that wait in vain."""

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
        heapq.heappush(self._timers, (self.now() + seconds, next(self._order), timer))
        return timer

    @property
    def timers(self) -> int:
        """Count the timers that wait."""
        return len(self._timers) - self.cancelled

    def compact(self) -> None:
        """Clear cancelled timers away, if they are the majority."""
        if 2 * self.cancelled > len(self._timers):
            self._timers = [entry for entry in self._timers if entry[2].run is not None]
            heapq.heapify(self._timers)
            self.cancelled = 0

    def step(self, timeout_s: float, take: Callable[[Transport, Completion], None]) -> None:
        """Do what there is to do, after waiting for it for at most ``timeout_s`` seconds."""
        wait_s, later = min(timeout_s, self._run_timers()), len(self._later)
        if later:
            wait_s = min(wait_s, _AFTERWARDS_S)
        asked = not self._work and self._asked_fd in dict(self._poller.poll(1e3 * wait_s))
        for _ in range(len(self._work)):  # what is asked for meanwhile waits: others may never stop asking
            self._work.popleft()()
        if asked:  # only now: who asks next is seen by the work that is left
            self._asked.take()
        self.collect(take)
        self._run_later(later)

    def collect(self, take: Callable[[Transport, Completion], None]) -> None:
        """Hand on everything the transports report now."""
        for transport in self._transports:
            for completion in transport.poll():
                take(transport, completion)

    def _run_timers(self) -> float:
        """Run what is due; returns the seconds until the next is."""
        now_s = self.now()
        while self._timers and self._timers[0][0] <= now_s:
            timer = heapq.heappop(self._timers)[2]
            run, timer.run = timer.run, None
            if run is None:
                self.cancelled -= 1
            else:
                run()
        return max(0.0, self._timers[0][0] - self.now()) if self._timers else float("inf")
