"""``ProcessLock``: a lock that a forked child is refused."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from kvrdma.errors import TransportClosedError


class ProcessLock:
    """A lock of the process that made it.

    A forked child has a copy of what it guards and none of the threads that serve it. A lease that it published would
    be a lease of its parent's to a consumer, over other blocks; what it pulled would never end; and what it polled
    would be missing from its parent.
    """

    def __init__(self) -> None:
        """Belong to this process."""
        self._pid = os.getpid()
        self._lock = threading.Lock()

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

    def __enter__(self) -> None:
        """Take it."""
        self.require()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        self._lock.release()
