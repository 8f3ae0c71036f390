"""The producer side: publications, and the answers to consumers. Runs in the server's thread and the caller's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import numpy as np

from kvrdma.engine.digest import digests_of
from kvrdma.engine.events import Stats
from kvrdma.errors import IncompatibleError, MessageError
from kvrdma.layout import KVLayout
from kvrdma.lease import Ended, FenceTable, LeaseBook, LeaseKey
from kvrdma.wire import (
    AnnounceRank,
    DescribeRanks,
    DigestRows,
    Goodbye,
    Heartbeat,
    LeaseDone,
    Message,
    Noted,
    RankDescription,
    RanksDescribed,
    RowDigests,
)

_MAX_RANKS = 65_536


class Producer:
    """What one rank publishes, and the descriptions of the ranks it speaks for. Thread-safe."""

    def __init__(
        self, book: LeaseBook, stats: Stats, clock: Callable[[], float], report: Callable[[Ended], None]
    ) -> None:
        self._book = book
        self._stats = stats
        self._clock = clock
        self._report = report
        self._lock = threading.Lock()
        self._ranks: dict[tuple[int, int], RankDescription] = {}
        self._layout: KVLayout | None = None
        self._engine_id = ""

    def describe_as(self, description: RankDescription, layout: KVLayout) -> None:
        """Answer questions about this rank with ``description``."""
        with self._lock:
            self._engine_id = description.engine_id
            self._ranks[description.rank] = description
            self._layout = layout

    def publish(self, request_id: Hashable, consumers: int, key: LeaseKey | None) -> LeaseKey:
        """Open a lease; see ``LeaseBook.publish``."""
        with self._lock:
            key = self._book.publish(request_id, self._clock(), consumers, key)
            self._stats.published += 1
            self._report_ended()  # its consumers may have been done already
            return key

    def withdraw(self, request_id: Hashable) -> bool:
        """End a publication; False if it has ended or never was."""
        with self._lock:
            known = self._book.withdraw(request_id)
            self._report_ended()
            return known

    def expire(self) -> None:
        """End the leases whose time is over."""
        with self._lock:
            self._book.expire(self._clock())
            self._report_ended()

    def close(self, fence: FenceTable) -> None:
        """Revoke every word."""
        with self._lock:
            for slot in range(len(fence)):
                fence.revoke(LeaseKey(slot, fence.word(slot) >> 1))

    def __len__(self) -> int:
        with self._lock:
            return len(self._book)

    def answer(self, message: Message) -> Message:
        """Answer one message of a consumer or of another rank of this engine.

        Raises:
            KVRDMAError: travels back as the answer.
        """
        if isinstance(message, DigestRows):
            return self._digest(message)  # takes long: not under the lock
        with self._lock:
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
        raise MessageError(f"an engine does not answer {type(message).__name__}")

    def _describe(self, question: DescribeRanks) -> RanksDescribed:
        if question.engine_id != self._engine_id:
            raise IncompatibleError(
                f"engine {question.engine_id} is asked for, engine {self._engine_id} runs here: it was restarted or "
                "replaced, and the blocks of the reference are gone"
            )
        missing = [rank for rank in question.ranks if rank not in self._ranks]
        if missing:
            raise IncompatibleError(
                f"engine {self._engine_id} has no ranks {missing} (yet): {len(self._ranks)} are known here; check the "
                "parallel sizes in the reference"
            )
        return RanksDescribed(tuple(self._ranks[rank] for rank in question.ranks))

    def _announce(self, description: RankDescription) -> Noted:
        if description.engine_id != self._engine_id:
            raise IncompatibleError(f"rank of engine {description.engine_id} announced to engine {self._engine_id}")
        if len(self._ranks) >= _MAX_RANKS:
            raise MessageError(f"more than {_MAX_RANKS} ranks announced")
        self._ranks[description.rank] = description
        return Noted(len(self._ranks))

    def _digest(self, message: DigestRows) -> RowDigests:
        rows = np.frombuffer(message.rows, "<u8")
        if len(message.rows) % 24 or self._layout is None:
            raise MessageError(f"{len(message.rows)} bytes of rows: need 24 each")
        rows = rows.reshape(-1, 3)
        regions = self._layout.regions
        for region, offset, length in rows.tolist():
            if region >= len(regions) or offset + length > regions[region].nbytes:
                raise MessageError(f"no bytes {offset} to {offset + length} of region {region}")
        places = ((regions[region].addr + offset, length) for region, offset, length in rows.tolist())
        return RowDigests(digests_of(places).astype("<u4").tobytes())

    def _report_ended(self) -> None:
        for ended in self._book.take_ended():
            self._stats.count_end(ended.how)
            self._report(ended)
