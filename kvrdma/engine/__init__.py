"""The engine: publish blocks, pull blocks, and hear how each of it ended."""

from __future__ import annotations

from kvrdma.engine.core import Engine
from kvrdma.engine.events import End, Ended, Event, PullDone, PullFailed, PullReleased

__all__ = ["End", "Ended", "Engine", "Event", "PullDone", "PullFailed", "PullReleased"]
