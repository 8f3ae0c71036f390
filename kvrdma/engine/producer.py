"""The producer side: publications, and the answers to consumers. Runs in the server's, clock's and caller's threads."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable

import msgspec

from kvrdma.engine.digest import answer_digests
from kvrdma.engine.events import Stats
from kvrdma.engine.process import ProcessLock
from kvrdma.errors import ConfigError, IncompatibleError, MessageError
from kvrdma.layout import KVLayout
from kvrdma.lease import Ended, FenceTable, LeaseBook, LeaseKey
from kvrdma.topology import EngineShape
from kvrdma.wire import (
    AnnounceRank,
    DescribeRanks,
    DigestRows,
    Goodbye,
    Heartbeat,
    LeaseDone,
    Message,
    Noted,
    RankAnnounced,
    RankDescription,
    RanksDescribed,
    RowDigests,
    askers_of,
)

_MAX_DESCRIPTION_BYTES = 1 << 20


def new_generation() -> int:
    """Name a start of an engine; random, so that a clock that steps back repeats none. JSON reads it exactly."""
    return 1 + secrets.randbelow(1 << 52)


class Producer:
    """What one rank publishes, and the descriptions of the ranks it speaks for. Thread-safe."""

    def __init__(
        self, book: LeaseBook, stats: Stats, clock: Callable[[], float], report: Callable[[Ended], None]
    ) -> None:
        """Publish nothing yet."""
        self._book = book
        self._stats = stats
        self._clock = clock
        self._report = report
        self._lock = ProcessLock()
        self._ranks: dict[tuple[int, int], RankDescription] = {}
        self._own: RankDescription | None = None
        self._layout: KVLayout | None = None
        self._num_ranks = (1, 1)
        self.generation = new_generation()
        """Of the engine; a rank that does not speak for it has this from the one that does."""

    def describe_as(self, description: RankDescription, shape: EngineShape, digest_of: KVLayout | None) -> None:
        """Answer questions about this rank.

        Args:
            description: of this rank.
            shape: of its engine, which says what ranks there are.
            digest_of: its layout, if consumers may ask for checksums of its bytes.
        """
        with self._lock.held():
            self._own = description
            self._ranks[description.rank] = description
            self._num_ranks = (max(1, len(shape.stages)), shape.num_ranks)
            self._layout = digest_of

    def publish(self, request_id: Hashable, consumers: int, key: LeaseKey | None) -> LeaseKey:
        """Open a lease; see ``LeaseBook.publish``."""
        with self._lock.held():
            try:
                key = self._book.publish(request_id, self._clock(), consumers, key)
                self._stats.published += 1
                return key
            finally:
                self._report_ended()  # its consumers may have been done already

    def prepare(self, key: LeaseKey) -> None:
        """Make a word live ahead of its publication; see ``LeaseBook.prepare``."""
        with self._lock.held():
            try:
                self._book.prepare(key)
            finally:
                self._report_ended()  # an older lease may have had the slot

    def discard(self, key: LeaseKey) -> None:
        """Take back a lease that was prepared and will not be published."""
        with self._lock.held():
            self._book.discard(key)

    def extend(self, request_id: Hashable, seconds: float) -> bool:
        """Hold a publication for ``seconds`` from now at least; False if it has ended or never was."""
        with self._lock.held():
            return self._book.extend(request_id, self._clock() + seconds)

    def withdraw(self, request_id: Hashable) -> bool:
        """End a publication; False if it has ended or never was."""
        with self._lock.held():
            known = self._book.withdraw(request_id)
            self._report_ended()
            return known

    def expire(self) -> float:
        """End the leases whose time is over; returns the seconds until there are more."""
        with self._lock.held():
            self._book.expire(self._clock())
            self._report_ended()
            next_s = self._book.next_deadline_s()
            return float("inf") if next_s is None else max(0.0, next_s - self._clock())

    def close(self, fence: FenceTable) -> None:
        """End every publication and revoke every word."""
        with self._lock.held():
            self._book.withdraw_all()
            self._report_ended()
            for slot in range(len(fence)):
                fence.revoke(LeaseKey(slot, fence.word(slot) >> 1))

    def counts(self) -> dict[str, int]:
        """Give the sizes of what is empty when nothing is going on, and of messages kept for leases to come.

        ``oldest_lease_s`` is the age of the oldest lease in whole seconds.
        """
        with self._lock.held():
            oldest_s = int(self._book.oldest_s(self._clock()))
            return {"leases": len(self._book), "early": self._book.remembered, "oldest_lease_s": oldest_s}

    def answer(self, message: Message) -> Message:
        """Answer one message of a consumer or of another rank of this engine.

        Raises:
            KVRDMAError: travels back as the answer.
        """
        if isinstance(message, DigestRows):
            return self._digest(message)  # takes long: not under the lock
        with self._lock.held():
            try:
                return self._answer(message)
            finally:
                self._report_ended()

    def _answer(self, message: Message) -> Message:
        now_s = self._clock()
        if isinstance(message, LeaseDone):
            key = LeaseKey(*message.lease)
            return Noted(int(self._book.done(key, message.consumer, message.rank, message.readers)))
        if isinstance(message, Heartbeat):
            return Noted(self._book.renew([LeaseKey(*lease) for lease in message.leases], now_s))
        if isinstance(message, Goodbye):
            self._book.forget_consumer(message.consumer, message.rank)
            return Noted()
        if isinstance(message, DescribeRanks):
            return self._describe(message)
        if isinstance(message, AnnounceRank):
            return self._announce(message.rank)
        raise MessageError(f"an engine listens here, and does not answer {askers_of(message)}: check the port")

    def _describe(self, question: DescribeRanks) -> RanksDescribed:
        self._require_engine(question.engine_id)
        missing = [rank for rank in question.ranks if rank not in self._ranks]
        if missing:
            raise IncompatibleError(
                f"engine {question.engine_id} has no ranks {missing[:8]} (yet): {len(self._ranks)} are known here; "
                "check the parallel sizes in the reference"
            )
        ranks = (msgspec.structs.replace(self._ranks[rank], generation=self.generation) for rank in question.ranks)
        return RanksDescribed(tuple(ranks))

    def _require_engine(self, engine_id: str) -> None:
        mine = self._own.engine_id if self._own else "(none yet)"
        if engine_id != mine:
            raise IncompatibleError(
                f"engine {engine_id} is asked for, engine {mine} runs here: it was restarted or replaced, and the "
                "blocks of the reference are gone"
            )

    def _announce(self, description: RankDescription) -> RankAnnounced:
        self._require_engine(description.engine_id)
        stages, ranks = self._num_ranks
        stage, rank = description.rank
        if self._own is not None and description.rank == self._own.rank:
            raise MessageError(f"rank {description.rank} is the one that was told: give each rank its own number")
        if stage >= stages or rank >= ranks:
            raise MessageError(f"rank {description.rank} of an engine of {stages} stages of {ranks} ranks")
        if len(msgspec.msgpack.encode(description)) > _MAX_DESCRIPTION_BYTES:
            raise MessageError(f"description of rank {description.rank} exceeds {_MAX_DESCRIPTION_BYTES} bytes")
        known = self._ranks.get(description.rank)
        if known is not None and known.start != description.start:
            self.generation = new_generation()  # the leases of a rank that has restarted are gone
        self._ranks[description.rank] = description
        return RankAnnounced(self.generation, len(self._ranks))

    def _digest(self, message: DigestRows) -> RowDigests:
        if self._layout is None:
            raise ConfigError("this engine makes no checksums: set KVRDMA_VERIFY=digest on both sides")
        return answer_digests(self._layout, message.rows)

    def _report_ended(self) -> None:
        for ended in self._book.take_ended():
            self._stats.count_end(ended.how)
            self._report(ended)
