"""``CircuitBreaker``: leave a peer that has failed repeatedly alone for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvrdma.errors import ConfigError

_log = logging.getLogger(__name__)


class CircuitBreaker:
    """Opens after consecutive failures, then admits one probe at a time. Thread-safe."""

    def __init__(
        self,
        name: str,
        cooldown_s: float,
        failure_threshold: int,
        probe_window_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start closed.

        Args:
            name: of what it guards, for the log.
            cooldown_s: how long it stays open.
            failure_threshold: consecutive failures that open it.
            probe_window_s: how long others wait for the outcome of a probe before the next may try.
            clock: seconds, monotonic.

        Raises:
            ConfigError: a value is not positive.
        """
        values = {
            "cooldown_s": cooldown_s,
            "failure_threshold": failure_threshold,
            "probe_window_s": probe_window_s,
        }
        for key, value in values.items():
            if not value > 0:
                raise ConfigError(f"circuit breaker {name}: {key}={value} must be positive")
        self.name = name
        self._cooldown_s = cooldown_s
        self._threshold = failure_threshold
        self._window_s = probe_window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until_s: float | None = None
        self._probe_until_s = float("-inf")

    @property
    def is_open(self) -> bool:
        """Whether it turns everybody away now."""
        with self._lock:
            return self._is_open(self._clock())

    def allow(self) -> bool:
        """Ask whether to try: yes while closed, no while open, then yes to one probe per window."""
        with self._lock:
            now_s = self._clock()
            if self._open_until_s is None:
                return True
            if self._is_open(now_s) or now_s < self._probe_until_s:
                return False
            self._probe_until_s = now_s + self._window_s
            return True

    def record_failure(self) -> None:
        """Count a failure; from the threshold on each one (re-)opens the breaker."""
        with self._lock:
            now_s = self._clock()
            self._failures += 1
            if self._failures < self._threshold:
                return
            if not self._is_open(now_s):
                _log.warning(
                    "circuit breaker %s open for %g s after %d failures",
                    self.name,
                    self._cooldown_s,
                    self._failures,
                )
            self._open_until_s = now_s + self._cooldown_s
            self._probe_until_s = float("-inf")

    def record_success(self) -> None:
        """Close it and start to count anew."""
        with self._lock:
            self._failures = 0
            self._open_until_s = None
            self._probe_until_s = float("-inf")

    def _is_open(self, now_s: float) -> bool:
        return self._open_until_s is not None and now_s < self._open_until_s
