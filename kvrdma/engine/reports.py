"""What has ended and was not polled yet, and which pulls are still to be reported."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable

import msgspec

from kvrdma.engine.events import Event, PullDone, PullFailed, PullReleased
from kvrdma.engine.process import ProcessLock
from kvrdma.engine.signal import Signal
from kvrdma.errors import KVRDMAError, PullError, TransportClosedError


class _Owed(msgspec.Struct, gc=False):
    """A promise to report the end of a pull."""

    quarantined: bool = False
    """Its failure has been reported, and nothing more than its release will be."""


class Reports:
    """Hands every end to the caller once. Thread-safe.

    Without a lock: a signal handler may come at any point of this and call the engine, which must not wait for what
    it has interrupted. What decides is each time one operation on a dictionary.
    """

    def __init__(self) -> None:
        """Know of nothing yet."""
        self._events: deque[Event] = deque()
        self._signal = Signal()
        self._process = ProcessLock()
        self._owed: dict[Hashable, _Owed] = {}
        """Pulls that have not ended."""
        self._closed = False

    def owe(self, request_id: Hashable) -> None:
        """Promise a report for a pull.

        Raises:
            PullError: one of that id is under way.
            TransportClosedError: no more promises are made.
        """
        self._process.require()
        promise = _Owed()
        if self._owed.setdefault(request_id, promise) is not promise:
            raise PullError(f"pull {request_id!r} is under way: one at a time")
        if self._closed and self._owed.pop(request_id, None) is promise:  # else it has been kept meanwhile
            raise TransportClosedError("the engine is closed")

    def add(self, event: Event) -> None:
        """Report something."""
        if isinstance(event, PullDone):
            self._owed.pop(event.request_id, None)
        elif isinstance(event, PullFailed) and event.quarantined:
            if owed := self._owed.get(event.request_id):
                owed.quarantined = True
        elif isinstance(event, PullFailed | PullReleased):
            self._owed.pop(event.request_id, None)
        self._events.append(event)
        self._signal.hand_over()

    def close(self) -> None:
        """Make no more promises."""
        self._closed = True

    def fail_the_rest(self, reason: KVRDMAError) -> None:
        """Report every pull that was promised and has not been."""
        for request_id, owed in list(self._owed.items()):
            if not owed.quarantined and self._owed.pop(request_id, None) is owed:
                self.add(PullFailed(request_id, reason, attempts=0))

    def __len__(self) -> int:
        """Count what ``poll`` would return; needs no lock and no system call."""
        return len(self._events)

    def poll(self) -> list[Event]:
        """Return what has been reported since the last call."""
        self._process.require()  # a child would take the signal for its parent's events
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
        self._process.require()
        deadline_s = time.monotonic() + timeout_s
        events = self.poll() if self._events or timeout_s <= 0 else []  # else at once: whom it waits for needs the GIL
        while not events and timeout_s > 0:
            if self._signal.wait(timeout_s):
                self._signal.take()  # before looking, as in ``poll``
            events, timeout_s = self._take(), deadline_s - time.monotonic()
        return events
