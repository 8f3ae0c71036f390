"""One pull on its way: what it wants, what is in flight for it, and how far it is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from kvrdma.engine.links import PeerEngine
from kvrdma.engine.loop import Timer
from kvrdma.errors import DataError, KVRDMAError
from kvrdma.plan import BlockSpan, ReadPlan, TokenRange
from kvrdma.reference import PullReference
from kvrdma.transport import ReadId

FIRST_LOOK_AGAIN_S, LAST_LOOK_AGAIN_S = 0.0005, 0.05


class ReadKey(msgspec.Struct, frozen=True):
    """Names a read among those of all transports."""

    transport: str
    read: ReadId


class Wanted(msgspec.Struct, frozen=True):
    """What the caller asked for."""

    request_id: Hashable
    reference: PullReference
    blocks: Sequence[BlockSpan]
    tokens: TokenRange | Sequence[TokenRange]
    started_s: float
    deadline_s: float


class Pull(msgspec.Struct, eq=False):
    """State of a pull; belongs to the engine's data thread.

    A pull waits for its peer. Then, per source rank: the lease's word is read, the data, the word again. It is over
    when nothing is in flight for it and it is either complete or has a ``reason`` to fail.
    """

    wanted: Wanted
    timers: dict[Hashable, Timer] = {}
    """What will happen to it, by purpose."""
    attempts: int = 0
    strikes: int = 0
    """Attempts that failed by the connection's fault, not because somebody else gave it up."""
    peer: PeerEngine | None = None
    plan: ReadPlan | None = None
    nbytes: int = 0
    rows: int = 0
    """Of the plan; rows before adjacent ones were joined."""
    data: dict[ReadKey, int] = {}
    """Data reads in flight, with the index of their source."""
    words: dict[ReadKey, int] = {}
    """Fence reads in flight, with the index of their source."""
    unopened: set[int] = msgspec.field(default_factory=set)
    """Sources to read whose word has not been seen live yet."""
    unfenced: set[int] = msgspec.field(default_factory=set)
    """Sources that were read and whose word has not been seen live since."""
    landing: dict[int, int] = {}
    """By source: the spare word of the fence table where its word lands."""
    posted: bool = False
    """Every data read has been posted."""
    over: bool = False
    """It has been reported, and nothing is done for it any more."""
    working: bool = False
    """Another thread compares checksums or reshapes."""
    shaped: bool = False
    """The reshapes have run."""
    look_again_s: float = FIRST_LOOK_AGAIN_S
    """How long to wait before the word of a source that has not published is read again."""
    asked_s: float = 0.0
    """When its last read was posted, of data or of a word."""
    posted_s: float = 0.0
    arrived_s: float = 0.0
    """When the last byte of data had."""
    rows_posted: int = 0
    plan_s: float = 0.0
    post_s: float = 0.0
    reshape_s: float = 0.0
    differs: DataError | None = None
    """What the checksums found; it counts if the words say that the lease was live meanwhile."""
    reason: KVRDMAError | None = None
    retryable: bool = False
    quarantined: bool = False

    @property
    def in_flight(self) -> bool:
        """Whether something may still write for it."""
        return bool(self.data or self.words or self.working)

    @property
    def landed(self) -> bool:
        """Whether all data lies in place, not yet in shape."""
        return self.posted and not self.data and not self.working and not self.shaped

    @property
    def complete(self) -> bool:
        """Whether everything has arrived, was live all the while, and is in shape."""
        return (
            self.shaped
            and self.posted
            and not (self.data or self.words or self.working or self.unopened or self.unfenced or self.reason)
        )

    def fail(self, reason: KVRDMAError, *, retryable: bool) -> None:
        """Give it a reason to fail; the first one counts, but one that rules out a retry always does."""
        if self.reason is None or (self.retryable and not retryable):
            self.reason, self.retryable = reason, retryable

    def take_shape(self) -> None:
        """Its reshapes have run, or there are none."""
        self.shaped = True

    def reset(self) -> None:
        """Forget the attempt; nothing may be in flight."""
        self.peer = self.plan = self.reason = self.differs = None
        self.unopened.clear()
        self.unfenced.clear()
        self.posted = self.shaped = self.retryable = False
        self.look_again_s = FIRST_LOOK_AGAIN_S
        self.nbytes = self.rows = self.rows_posted = 0

    def state(self) -> str:
        """Say for people what it waits for."""
        if self.peer is None:
            return "waiting for the handshake"
        if self.data:
            return f"waiting for the data of {len(self.data)} ranks"
        if self.unopened:
            return f"waiting for {len(self.unopened)} ranks to publish"
        return "waiting for a checksum or a reshape" if self.working else "waiting for the fence"
