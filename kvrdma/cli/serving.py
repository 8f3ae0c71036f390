"""What commands that serve until they are told to stop have in common."""

from __future__ import annotations

import signal
from typing import Protocol

from kvrdma.errors import KVRDMAError


class Server(Protocol):
    """Something with threads of its own."""

    @property
    def alive(self) -> bool:
        """Whether it still serves."""
        ...

    def close(self) -> None:
        """End it; raises the defect by which it ended, if it did."""
        ...


def serve_until(stops: set[signal.Signals], server: Server, what: str) -> None:
    """Wait for one of the signals ``stops``, which every thread blocks.

    Raises:
        KVRDMAError: ``what`` has ended by itself.
    """
    while server.alive:
        info = signal.sigtimedwait(stops, 1.0)
        if info is not None and info.si_signo in stops:  # stopped and continued, it returns one of no signal
            return
    error = KVRDMAError(f"the {what} was ended by a defect: see the log")
    try:
        server.close()
    except Exception as defect:  # noqa: BLE001 - whatever its side channel ended with: it is in the log
        error.__cause__ = defect
    raise error
