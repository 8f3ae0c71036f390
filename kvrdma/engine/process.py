"""``ProcessLock``: a lock that a forked child is refused."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

from kvrdma.errors import TransportClosedError


class ProcessLock:
    """A lock of the process that made it.

    A forked child has a copy of what it guards and none of the threads that serve it. A lease that it published would
    be a lease of its parent's to a consumer, over other blocks; what it pulled would never end; and what it polled
    would be missing from its parent.

    ``with lock.held():`` takes it. A signal handler that raises does so before or after that, never in between: behind
    an ``__enter__`` of Python code the lock would stay taken. What runs in the middle of what it guards, in the thread
    that holds it (a handler, a finalizer that the collector calls), does not wait for itself.
    """

    def __init__(self) -> None:
        """Belong to this process."""
        self._pid = os.getpid()
        self._lock = threading.RLock()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that made it."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Refuse a child.

        Raises:
            TransportClosedError: this is one.
        """
        if os.getpid() != self._pid:
            raise TransportClosedError(
                f"an engine does not survive fork: it was opened in process {self._pid} and this is process "
                f"{os.getpid()}; open one here, or spawn instead of forking"
            )

    def held(self) -> AbstractContextManager[object]:
        """Give what takes it.

        Raises:
            TransportClosedError: this is a child.
        """
        self.require()
        return self._lock
