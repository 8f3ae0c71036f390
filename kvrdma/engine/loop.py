"""The data thread's loop: what others ask of it, what is due, what the transports report."""

from __future__ import annotations

import ctypes
import heapq
import itertools
import os
import select
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvrdma.engine.background import Work
from kvrdma.engine.process import ProcessLock
from kvrdma.transport import Completion, Transport

_COMPACT_AT = 64


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
        self._process = ProcessLock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd).atexit = False  # threads that still run would meet another file
        # By way of ctypes, because it keeps the GIL: ``os.eventfd_write`` lets go of it, and a caller of ``pull`` would
        # wait for it until the plan that it has just asked for is made (measured: 2 ms instead of 0.1 ms).
        self._wake = ctypes.PyDLL(None).eventfd_write
        self._wake.argtypes = (ctypes.c_int, ctypes.c_uint64)
        self._poller = select.poll()
        for fd in (self._fd, *(transport.fileno() for transport in self._transports)):
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
        self._wake(self._fd, 1)

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
        wait_s = min(timeout_s, self._run_timers())
        if not self._work:
            self._poller.poll(1e3 * wait_s)
        with suppress(BlockingIOError):  # only a transport or a timer has woken us
            os.eventfd_read(self._fd)
        while self._work:
            self._work.popleft()()
        self.collect(take)

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
