"""What has ended and was not polled yet, and which pulls are still to be reported."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable

from kvrdma.engine.events import Event, PullDone, PullFailed, PullReleased
from kvrdma.engine.process import ProcessLock
from kvrdma.engine.signal import Signal
from kvrdma.errors import KVRDMAError, PullError, TransportClosedError


class Reports:
    """Hands every end to the caller once. Thread-safe."""

    def __init__(self) -> None:
        """Know of nothing yet."""
        self._events: deque[Event] = deque()
        self._signal = Signal()
        self._lock = ProcessLock()
        self._owed: dict[Hashable, bool] = {}
        """Pulls that have not ended; True: reported as quarantined already."""
        self._closed = False

    def owe(self, request_id: Hashable) -> None:
        """Promise a report for a pull.

        Raises:
            PullError: one of that id is under way.
            TransportClosedError: no more promises are made.
        """
        with self._lock.held():
            if self._closed:
                raise TransportClosedError("the engine is closed")
            if request_id in self._owed:
                raise PullError(f"pull {request_id!r} is under way: one at a time")
            self._owed[request_id] = False

    def add(self, event: Event) -> None:
        """Report something."""
        with self._lock.inner:  # only the engine's own threads, or what has asked for a lock of this process, come here
            if isinstance(event, PullDone):
                self._owed.pop(event.request_id, None)
            elif isinstance(event, PullFailed) and event.quarantined:
                self._owed[event.request_id] = True
            elif isinstance(event, PullFailed | PullReleased):
                self._owed.pop(event.request_id, None)
        self._events.append(event)
        self._signal.hand_over()

    def close(self) -> None:
        """Make no more promises."""
        with self._lock.held():
            self._closed = True

    def fail_the_rest(self, reason: KVRDMAError) -> None:
        """Report every pull that was promised and has not been."""
        with self._lock.held():
            rest = [request_id for request_id, reported in self._owed.items() if not reported]
        for request_id in rest:
            self.add(PullFailed(request_id, reason, attempts=0))

    def __len__(self) -> int:
        """Count what ``poll`` would return; needs no lock and no system call."""
        return len(self._events)

    def poll(self) -> list[Event]:
        """Return what has been reported since the last call."""
        self._lock.require()  # a child would take the signal for its parent's events
        self._signal.clear()  # before looking: what comes later makes it readable again
        return self._take()

    def _take(self) -> list[Event]:
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def fileno(self) -> int:
        """Give a descriptor that is readable when ``poll`` may have something."""
        return self._signal.fileno()

    def wait(self, timeout_s: float) -> list[Event]:
        """Poll, waiting for something to return for at most ``timeout_s`` seconds."""
        self._lock.require()
        deadline_s = time.monotonic() + timeout_s
        events = self.poll() if self._events or timeout_s <= 0 else []  # else at once: whom it waits for needs the GIL
        while not events and timeout_s > 0:
            if self._signal.wait(timeout_s):
                self._signal.take()  # before looking, as in ``poll``
            events, timeout_s = self._take(), deadline_s - time.monotonic()
        return events
