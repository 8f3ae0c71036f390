"""Waiting for a pipe, whatever the number of its descriptor: ``select.select`` ends at 1024."""

from __future__ import annotations

import select
from typing import IO, Any


def wait_readable(pipe: IO[Any], timeout_s: float) -> bool:
    """Wait until there is something to read, or the other end has closed; False if the time is over."""
    poller = select.poll()
    poller.register(pipe.fileno(), select.POLLIN)
    return bool(poller.poll(1e3 * timeout_s))
