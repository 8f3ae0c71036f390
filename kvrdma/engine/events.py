"""What ``Engine.poll`` returns, and what an engine counts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from kvrdma.errors import KVRDMAError
from kvrdma.lease import End, Ended


class PullDone(msgspec.Struct, frozen=True):
    """Every byte of the request is in place, and was the request's own when it was read."""

    request_id: Hashable
    """What ``pull`` was given."""
    nbytes: int
    """Bytes read from all source ranks."""
    rows: int
    """Rows of the plan, before those that are adjacent on both sides were joined."""
    rows_posted: int
    """Rows that the transports posted for them."""
    elapsed_s: float
    """From ``pull`` to here."""
    read_s: float
    """From the first post of data to the last word of the fence."""
    data_s: float
    """Of that, until the last byte of data, and the lease's word behind it, had arrived; the rest is the engine's."""
    attempts: int
    """1, unless a connection failed and it was tried again."""
    via: tuple[str, ...]
    """Transport and mechanism per source rank."""
    plan_s: float = 0.0
    """Of ``elapsed_s``, for the plan."""
    post_s: float = 0.0
    """Of ``read_s``, for handing the rows over."""
    reshape_s: float = 0.0
    """Of ``read_s``, for the transposes."""


class PullFailed(msgspec.Struct, frozen=True):
    """The pull ended without its bytes. Unless ``quarantined``, nothing will be written any more."""

    request_id: Hashable
    reason: KVRDMAError
    """Its class says what kind of failure: docs/troubleshooting.md has them all."""
    attempts: int
    """0: it never got to a thread of the engine."""
    quarantined: bool = False
    """A transport has not answered: the blocks must not be reused before ``PullReleased``."""


class PullReleased(msgspec.Struct, frozen=True):
    """The transport has given up on a quarantined pull: its blocks may be reused."""

    request_id: Hashable


Event: TypeAlias = PullDone | PullFailed | PullReleased | Ended


@dataclass(slots=True)
class Stats:
    """Counts since the engine was opened, of this rank; times in seconds, sizes in bytes."""

    pulls_started: int = 0
    pulls_done: int = 0
    pulls_failed: int = 0
    pulls_retried: int = 0
    """Attempts beyond a pull's first."""
    pulled_bytes: int = 0
    rows_posted: int = 0
    """Of pulls that were done; both."""
    fence_rejections: int = 0
    """Times that the fence said that a lease had ended: bytes that would have been somebody else's."""
    handshakes: int = 0
    handshakes_failed: int = 0
    peers_lost: int = 0
    """Engines whose transport reported a rank as gone."""
    quarantined: int = 0
    """Pulls whose blocks may still be written, now: ``PullReleased`` ends it."""
    published: int = 0
    """Leases that began; the next three say how they ended."""
    publications_done: int = 0
    publications_expired: int = 0
    publications_withdrawn: int = 0

    def count_pull(self, nbytes: int, rows_posted: int) -> None:
        """Count a pull that has succeeded."""
        self.pulls_done += 1
        self.pulled_bytes += nbytes
        self.rows_posted += rows_posted

    def count_end(self, how: End) -> None:
        """Count a publication that ended."""
        name = {End.DONE: "done", End.EXPIRED: "expired", End.WITHDRAWN: "withdrawn"}[how]
        setattr(self, f"publications_{name}", getattr(self, f"publications_{name}") + 1)


__all__ = ["End", "Ended", "Event", "PullDone", "PullFailed", "PullReleased", "Stats"]
