"""Starts threads, and says what is wrong where there can be no more of them."""

from __future__ import annotations

import threading

from kvrdma.errors import ConfigError


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        ConfigError: the host, the user or the container has as many as it may.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise ConfigError(
            f"the thread {thread.name!r} cannot be started: {error}; raise `ulimit -u`, or the container's limit of "
            "pids or memory"
        ) from None
