"""Threads for what blocks: handshakes, comparisons of checksums, reshapes of host memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from kvrdma.errors import ConfigError
from kvrdma.thread_start import start_thread

Work: TypeAlias = Callable[[], object]


class Background:
    """Runs work in daemon threads, at most ``limit`` at a time; the rest waits for its turn.

    A thread ends when it finds no work, so an idle engine has none.
    """

    def __init__(self, name: str, limit: int) -> None:
        """Name the threads ``name``; none is started yet."""
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: deque[Work] = deque()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiting) + len(self._threads)

    def run(self, work: Work) -> None:
        """Run ``work``, which catches its own errors; dropped after ``close``.

        Raises:
            ConfigError: it will not run, for want of a thread.
        """
        with self._lock:
            if self._closed:
                return
            self._waiting.append(work)
            if len(self._threads) >= self._limit:
                return
            thread = threading.Thread(target=self._work, name=f"kvrdma {self._name}", daemon=True)
            self._threads.add(thread)
        try:
            start_thread(thread)
        except ConfigError:
            with self._lock:
                self._threads.discard(thread)
                if self._threads or work not in self._waiting:
                    return  # others do it
                self._waiting.remove(work)
            raise

    def close(self, timeout_s: float) -> None:
        """Drop what waits, and give what runs ``timeout_s`` seconds to end."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            threads = list(self._threads)
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _work(self) -> None:
        while (work := self._next()) is not None:
            work()

    def _next(self) -> Work | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._threads.discard(threading.current_thread())  # in the lock: ``run`` starts another from here on
            return None
