"""A clock that stands still until it is told to move, so that tests of deadlines need no sleep."""

from __future__ import annotations


class FakeClock:
    """Call it for the time in seconds; ``advance`` moves it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        """Give the time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds``; a clock never goes back."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot move by {seconds} s")
        self._now_s += seconds
