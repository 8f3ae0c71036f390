"""What has ended and was not polled yet, and which pulls are still to be reported."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from itertools import repeat, starmap

import msgspec

from kvrdma.engine.events import Event, PullDone, PullFailed, PullReleased
from kvrdma.engine.process import ProcessLock
from kvrdma.engine.signal import Signal
from kvrdma.errors import KVRDMAError, PullError, TransportClosedError


class Promise(msgspec.Struct, gc=False):
    """To report the end of a pull."""

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
        self._owed: dict[Hashable, Promise] = {}
        """Pulls that have not ended."""
        self._closed = False

    def owe(self, request_id: Hashable, promise: Promise) -> None:
        """Promise a report for a pull.

        Raises:
            PullError: one of that id is under way.
            TransportClosedError: no more promises are made.
        """
        self._process.require()
        if self._owed.setdefault(request_id, promise) is not promise:
            raise PullError(f"pull {request_id!r} is under way: one at a time")
        if self._closed and self.take_back(request_id, promise):  # else it has been kept meanwhile
            raise TransportClosedError("the engine is closed")

    def owes(self, request_id: Hashable, promise: Promise) -> bool:
        """Whether that promise was made and has not been kept."""
        return self._owed.get(request_id) is promise

    def take_back(self, request_id: Hashable, promise: Promise) -> bool:
        """Do not keep a promise; False if it has been kept, or was never made."""
        return self.owes(request_id, promise) and self._owed.pop(request_id, None) is promise

    def give_up(self, request_id: Hashable, promise: Promise, abort: Callable[[Hashable], bool]) -> None:
        """Settle what a caller was interrupted in: a pull that has begun is aborted and reported, another never was.

        Args:
            request_id: of the pull.
            promise: the caller's, who does not know whether it was made.
            abort: aborts a pull; False if there is none (any more).
        """
        if self.owes(request_id, promise) and not abort(request_id):
            self.take_back(request_id, promise)

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
        while self._owed:
            try:
                request_id, promise = self._owed.popitem()
            except KeyError:  # kept, or taken back, at this moment
                return
            if not promise.quarantined:
                self.add(PullFailed(request_id, reason, attempts=0))

    def __len__(self) -> int:
        """Count what ``poll`` would return; needs no lock and no system call."""
        return len(self._events)

    def poll(self) -> list[Event]:
        """Return what has been reported since the last call."""
        self._process.require()  # a child would take the signal for its parent's events
        return self._take(self._signal.clear)

    def _take(self, clear: Callable[[], None]) -> list[Event]:
        """Clear the signal, and take everything by one call: neither another thread nor a handler gets in between."""
        events: list[Event] = []
        try:
            clear()  # before looking: what comes later makes it readable again
            events.extend(starmap(self._events.popleft, repeat((), len(self._events))))
        except IndexError:  # another thread, or a handler, has taken what was counted
            pass
        except BaseException:  # a handler that raises
            self._events.extendleft(reversed(events))
            self._signal.set()
            raise
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
            readable = self._signal.wait(timeout_s)
            events = self._take(self._signal.take if readable else self._signal.clear)
            timeout_s = deadline_s - time.monotonic()
        return events
