"""One pull on its way: what it wants, what is in flight for it, and how far it is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrdma.engine.links import PeerEngine
from kvrdma.errors import KVRDMAError
from kvrdma.plan import BlockSpan, ReadPlan, TokenRange
from kvrdma.reference import PullReference
from kvrdma.transport import ReadId


class ReadKey(NamedTuple):
    """Names a read among those of all transports."""

    transport: str
    read: ReadId


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the caller asked for."""

    request_id: Hashable
    reference: PullReference
    blocks: Sequence[BlockSpan]
    tokens: TokenRange | Sequence[TokenRange]
    started_s: float
    deadline_s: float


@dataclass(slots=True, eq=False)
class Pull:
    """State of a pull; belongs to the engine's data thread.

    A pull waits for its peer, then has reads in flight: first data, then per source rank a word of the fence. It is
    over when nothing is in flight for it and it is either complete or has a ``reason`` to fail.
    """

    wanted: Wanted
    attempts: int = 0
    peer: PeerEngine | None = None
    plan: ReadPlan | None = None
    data: dict[ReadKey, int] = field(default_factory=dict)
    """Data reads in flight, with the index of their source."""
    words: dict[ReadKey, int] = field(default_factory=dict)
    """Fence reads in flight, with the index of their source."""
    unfenced: set[int] = field(default_factory=set)
    """Sources that were read and whose word has not been seen live."""
    landing: dict[int, int] = field(default_factory=dict)
    """By source: the spare word of the fence table where its word lands."""
    checking: bool = False
    """A comparison of checksums is under way in another thread."""
    shaped: bool = False
    """The reshapes have run."""
    posted_s: float = 0.0
    rows_posted: int = 0
    reason: KVRDMAError | None = None
    retryable: bool = False
    quarantined: bool = False

    @property
    def in_flight(self) -> bool:
        """Whether something may still write for it."""
        return bool(self.data or self.words or self.checking)

    @property
    def complete(self) -> bool:
        """Whether everything has arrived, was live afterwards, and is in shape."""
        return not (self.in_flight or self.unfenced or self.reason) and self.shaped

    def fail(self, reason: KVRDMAError, *, retryable: bool) -> None:
        """Give it a reason to fail; the first one counts, but one that rules out a retry always does."""
        if self.reason is None or (self.retryable and not retryable):
            self.reason, self.retryable = reason, retryable

    def reset(self) -> None:
        """Forget the attempt; nothing may be in flight."""
        self.peer = self.plan = self.reason = None
        self.unfenced.clear()
        self.landing.clear()
        self.shaped = self.retryable = False
