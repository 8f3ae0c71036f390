"""Leases and the one-sided fence: how a late read is told from one in time, without asking the producer.

The producer holds a request's blocks under a *lease*, and keeps one 64-bit word per lease in a registered
table: ``generation << 1 | valid``. It clears the valid bit before the blocks can be used for anything else. A
consumer reads the word one-sided before its first read of data is posted and again after the last has arrived:
only if both times it is the live word of its own generation is the pull a success. A generation that was revoked
never comes back, so the word was live all the while, and so were the blocks. (Data read before the producer had
published would pass the word afterwards: that alone is read only where a reference is ``live``, given out later.)

Within a process generations only grow, so a slot can be reused at once; a process starts at a random one, so that
messages meant for its predecessor at the same address name no lease of its own, whatever the clock says.

Why the order of stores holds: both the revocation and the store that reuses a block are aligned, and whoever
reuses a block has heard of the end through a lock, a queue or a kernel launch, each of which orders stores. A
reader that sees the new bytes therefore sees the revoked word when it looks later.

Everything but the table itself is pure: times are arguments, on the producer's clock alone.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np

from kvrdma.errors import ConfigError, LeaseError

WORD_NBYTES = 8
_FIRST_GENERATIONS = range(1 << 32, 1 << 51)
"""Far below 2**53, which JSON parsers of proxies still read exactly."""
_LAST_GENERATION = 1 << 53
_MAX_EARLY = 65_536
_MAX_READERS = 16_384
_SPARE_CONSUMERS = 64


class LeaseKey(NamedTuple):
    """Names a lease among all leases of a producer, for ever."""

    slot: int
    generation: int


class Verdict(Enum):
    """What a word says about a lease."""

    LIVE = "the blocks are still the request's"
    NOT_YET = "the producer has not published the lease yet: look again"
    REVOKED = "the lease has ended: the blocks may hold anything"


def judge(word: int, key: LeaseKey) -> Verdict:
    """Compare a word read from a lease's slot with the lease."""
    generation, valid = word >> 1, word & 1
    if generation == key.generation and valid:
        return Verdict.LIVE
    return Verdict.NOT_YET if generation < key.generation else Verdict.REVOKED


class FenceTable:
    """The words. One writer at a time; peers read them at any time.

    Behind them lie spare words, registered with them, where this process lands the words it reads from peers.
    """

    def __init__(self, slots: int, spare: int = 0) -> None:
        """Make a table of ``slots`` words, none of them live, and ``spare`` others.

        Raises:
            ConfigError: fewer than 1 or more than 2**20 slots.
        """
        if not 1 <= slots <= 1 << 20:
            raise ConfigError(f"{slots} lease slots (KVRDMA_FENCE_SLOTS): use 1 to {1 << 20}")
        self._slots = slots
        self._words = np.zeros(slots + spare, np.uint64)
        self._addr = int(self._words.ctypes.data)  # asking for it takes longer than everything else about a word
        self._view = self._words.data
        """For what is done while a pull waits: NumPy's own indexing takes ten times as long after a rest."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(slots))
        self._generation = _FIRST_GENERATIONS.start + secrets.randbelow(len(_FIRST_GENERATIONS))

    @property
    def addr(self) -> int:
        """Address of slot 0."""
        return self._addr

    @property
    def nbytes(self) -> int:
        """Size of the table, spare words included."""
        return self._words.nbytes

    def __len__(self) -> int:
        return self._slots

    @property
    def spare(self) -> int:
        """How many spare words there are, behind the others."""
        return len(self._words) - self._slots

    def clear_spare(self, slot: int) -> int:
        """Make a spare word say nothing, before a read lands in it; returns its address."""
        self._view[slot] = 0
        return self._addr + WORD_NBYTES * slot

    def allocate(self) -> LeaseKey:
        """Take a free slot and a generation that no lease had before; its word is not live yet.

        Raises:
            LeaseError: every slot is taken.
        """
        if not self._free:
            why = "consumers do not finish, or KVRDMA_FENCE_SLOTS is too small"
            raise LeaseError(f"all {len(self)} leases are taken: {why}")
        self._generation += 1
        return LeaseKey(self._free.popitem(last=False)[0], self._generation)

    def take(self, key: LeaseKey) -> None:
        """Take the slot of a lease that another rank allocated, if it is free."""
        self._free.pop(key.slot, None)
        self._generation = max(self._generation, key.generation)

    def make_live(self, key: LeaseKey) -> None:
        """Let consumers succeed with ``key`` from now on."""
        self._words[key.slot] = key.generation << 1  # first, so that no torn read joins an old generation and the bit
        self._words[key.slot] = key.generation << 1 | 1

    def revoke(self, key: LeaseKey) -> None:
        """Let no consumer succeed with ``key`` any more, unless it has read the word already."""
        self._words[key.slot] = key.generation << 1

    def release(self, key: LeaseKey) -> None:
        """Give back a slot from ``allocate`` or ``take``, revoked."""
        self._free[key.slot] = None

    def word(self, slot: int) -> int:
        """Read a word, as a consumer would; slots from ``len(self)`` on are the spare ones."""
        return self._view[slot]


class End(Enum):
    """How a publication ended."""

    DONE = "every consumer is done"
    EXPIRED = "its lease ran out"
    WITHDRAWN = "the producer took it back"


@dataclass(slots=True)
class _Lease:
    request_id: Hashable
    since_s: float
    deadline_s: float
    consumers: int
    readers: dict[str, frozenset[int]] = field(default_factory=dict)
    """By consumer engine: which of its ranks read this rank."""
    done: set[tuple[str, int]] = field(default_factory=set)

    def has_room(self, readers: int) -> bool:
        """Bound what invented consumers can make us remember."""
        known = sum(map(len, self.readers.values()))
        return len(self.readers) < self.consumers + _SPARE_CONSUMERS and known + readers <= _MAX_READERS

    def is_done(self) -> bool:
        finished = (all((engine, rank) in self.done for rank in ranks) for engine, ranks in self.readers.items())
        return sum(finished) >= self.consumers


class Ended(msgspec.Struct, frozen=True):
    """A publication that ended; its word was revoked before this was made."""

    request_id: Hashable
    how: End


class LeaseBook:
    """The leases of one producer rank. Not thread-safe: the owner locks.

    A lease ends exactly once. Messages about leases that are unknown, ended or of another generation change
    nothing; those that come before their lease are remembered, up to a bound.
    """

    def __init__(self, table: FenceTable, lease_s: float) -> None:
        """Keep leases of ``lease_s`` seconds over ``table``."""
        self._table = table
        self._lease_s = lease_s
        self._leases: dict[LeaseKey, _Lease] = {}
        self._keys: dict[Hashable, LeaseKey] = {}
        self._by_slot: dict[int, LeaseKey] = {}
        self._prepared: dict[int, LeaseKey] = {}
        """By slot; live, and not published yet."""
        self._early: OrderedDict[LeaseKey, dict[tuple[str, int], frozenset[int]]] = OrderedDict()
        self._early_size = 0
        self._ended: list[Ended] = []

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._keys

    def oldest_s(self, now_s: float) -> float:
        """Give the age in seconds of the oldest lease; 0 if there is none."""
        return now_s - next((lease.since_s for lease in self._leases.values()), now_s)  # in the order of publication

    def prepare(self, key: LeaseKey) -> None:
        """Make a lease's word live ahead of ``publish``: its reference goes out as soon as the KV is there.

        Who gives out a reference only after every rank has prepared, and after the KV was computed, spares consumers
        the first look at the word. Until then nobody knows the lease, whatever the blocks hold. Raises as ``publish``.
        """
        if not self._is_prepared(key):
            self._adopt(f"lease {tuple(key)}", key)
        self._prepared[key.slot] = key
        self._table.make_live(key)

    def discard(self, key: LeaseKey) -> None:
        """Take back a prepared lease that will not be published; others are left alone."""
        if self._is_prepared(key):
            self._forget_prepared(key.slot)
            self._table.revoke(key)
            self._table.release(key)

    def _is_prepared(self, key: LeaseKey) -> bool:
        if not isinstance(key, LeaseKey):
            raise LeaseError(f"a lease is named by a LeaseKey, such as a reference's `lease`; got {key!r:.80}")
        return self._prepared.get(key.slot) == key

    def _forget_prepared(self, slot: int) -> None:
        if slot in self._prepared:
            self._take_early(self._prepared.pop(slot))

    def publish(self, request_id: Hashable, now_s: float, consumers: int = 1, key: LeaseKey | None = None) -> LeaseKey:
        """Open a lease for ``request_id`` and make its word live.

        Args:
            request_id: any hashable; one live publication each.
            now_s: time on the producer's clock.
            consumers: how many consumer engines will read it.
            key: the lease that another rank of this engine allocated for the same request; its own otherwise. An
                older one that has the slot here ends as expired, or was never published: its rank has moved on.

        Raises:
            LeaseError: the request is published already, or the slot is taken or does not exist.
        """
        if request_id in self._keys:
            raise LeaseError(f"request {request_id!r} is published already: withdraw it first")
        if consumers < 1:
            raise LeaseError(f"request {request_id!r}: consumers={consumers}, needs at least 1")
        if adopted := key is not None:
            if not self._is_prepared(key):
                self._adopt(request_id, key)
        else:
            key = self._table.allocate()
        try:
            self._open(request_id, key, _Lease(request_id, now_s, now_s + self._lease_s, consumers))
        except BaseException:  # a signal handler that raises: nobody gets to know the lease
            self._undo(request_id, key)
            raise
        for (consumer, rank), readers in self._take_early(key).items():
            if adopted:  # nobody can have known a lease of our own before
                self.done(key, consumer, rank, readers)
        return key

    def _open(self, request_id: Hashable, key: LeaseKey, lease: _Lease) -> None:
        self._prepared.pop(key.slot, None)
        self._by_slot[key.slot] = key
        self._keys[request_id] = key
        self._table.make_live(key)
        self._leases[key] = lease  # last: a handler may close the engine in the middle of this

    def _undo(self, request_id: Hashable, key: LeaseKey) -> None:
        self._table.revoke(key)
        self._leases.pop(key, None)
        self._by_slot.pop(key.slot, None)
        self._keys.pop(request_id, None)
        self._table.release(key)

    def _adopt(self, request_id: Hashable, key: LeaseKey) -> None:
        if not 0 <= key.slot < len(self._table):
            raise LeaseError(f"request {request_id!r}: slot {key.slot} of {len(self._table)} does not exist")
        if key.generation > _LAST_GENERATION:
            raise LeaseError(f"request {request_id!r}: lease {key} was made by no engine")
        if self._table.word(key.slot) >> 1 >= key.generation:
            raise LeaseError(f"request {request_id!r}: lease {key} has ended already, or its slot is taken")
        if key.slot in self._by_slot:
            self._end(self._by_slot[key.slot], End.EXPIRED)
        self._forget_prepared(key.slot)
        self._table.take(key)

    def done(self, key: LeaseKey, consumer: str, rank: int, readers: Iterable[int]) -> bool:
        """Note that ``rank`` of engine ``consumer`` needs the lease no longer.

        Args:
            key: the lease.
            consumer: engine id.
            rank: which of its ranks.
            readers: all of its ranks that read this rank; the first message of an engine counts.

        Returns:
            False if the message came too early or too late, or came before.
        """
        lease = self._leases.get(key)
        if lease is None:
            self._remember(key, consumer, rank, frozenset(readers))
            return False
        ranks = lease.readers.get(consumer) or frozenset(readers)
        if consumer not in lease.readers and not lease.has_room(len(ranks)):
            return False
        if (consumer, rank) in lease.done or rank not in ranks:
            return False
        lease.readers[consumer] = ranks
        lease.done.add((consumer, rank))
        if lease.is_done():
            self._end(key, End.DONE)
        return True

    def _remember(self, key: LeaseKey, consumer: str, rank: int, readers: frozenset[int]) -> None:
        if not 0 <= key.slot < len(self._table):
            return
        if self._table.word(key.slot) >> 1 >= key.generation and not self._is_prepared(key):
            return  # it has ended, or never was
        early = self._early.setdefault(key, {})
        if (consumer, rank) not in early:
            early[consumer, rank] = readers
            self._early_size += 1 + len(readers)
        while self._early_size > _MAX_EARLY:
            self._take_early(next(iter(self._early)))

    def _take_early(self, key: LeaseKey) -> dict[tuple[str, int], frozenset[int]]:
        messages = self._early.pop(key, {})
        self._early_size -= sum(1 + len(readers) for readers in messages.values())
        return messages

    def renew(self, keys: Iterable[LeaseKey], now_s: float) -> int:
        """Extend the leases that a consumer still needs; returns how many of them are live."""
        known = [self._leases[key] for key in keys if key in self._leases]
        for lease in known:
            lease.deadline_s = max(lease.deadline_s, now_s + self._lease_s)
        return len(known)

    def extend(self, request_id: Hashable, deadline_s: float) -> bool:
        """Hold a publication until ``deadline_s`` at least; False if there is none (any more)."""
        lease = self._leases.get(self._keys.get(request_id))  # type: ignore[arg-type] # None names no lease
        if lease is not None:
            lease.deadline_s = max(lease.deadline_s, deadline_s)
        return lease is not None

    def forget_consumer(self, consumer: str, rank: int) -> None:
        """Count a consumer rank that has said goodbye as done wherever it reads."""
        for key, lease in list(self._leases.items()):
            if rank in lease.readers.get(consumer, ()):
                self.done(key, consumer, rank, lease.readers[consumer])

    def withdraw(self, request_id: Hashable) -> bool:
        """End a publication now; False if there is none (any more)."""
        key = self._keys.get(request_id)
        if key is not None:
            self._end(key, End.WITHDRAWN)
        return key is not None

    def expire(self, now_s: float) -> None:
        """End every lease whose time is over."""
        for key in [key for key, lease in self._leases.items() if lease.deadline_s <= now_s]:
            self._end(key, End.EXPIRED)

    def next_deadline_s(self) -> float | None:
        """When ``expire`` has something to do at the earliest."""
        return min((lease.deadline_s for lease in self._leases.values()), default=None)

    def withdraw_all(self) -> None:
        """End every publication now."""
        for key in list(self._leases):
            self._end(key, End.WITHDRAWN)
        for key in list(self._prepared.values()):
            self.discard(key)

    @property
    def remembered(self) -> int:
        """Count the messages that came before their lease, with the ranks they name."""
        return self._early_size

    def take_ended(self) -> list[Ended]:
        """Return what has ended since the last call; its blocks may be reused."""
        ended, self._ended = self._ended, []
        return ended

    def _end(self, key: LeaseKey, how: End) -> None:
        self._table.revoke(key)  # before anybody can hear that the blocks are free
        if (lease := self._leases.pop(key, None)) is None:  # a handler has closed the engine at this point
            return
        del self._keys[lease.request_id]
        del self._by_slot[key.slot]
        self._table.release(key)
        self._ended.append(Ended(lease.request_id, how))
