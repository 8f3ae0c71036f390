"""Which block lies where in a store's memory, and what has to go when it is full. Pure: no bytes, no clock.

The memory is cut into chunks; a family owns chunks and keeps records in them. Within a family the block that was
used longest ago goes first. A family takes a chunk of another one when everything in that was used longer ago than
all it has itself, or when it has less than its share and everything of its own is in use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvrdma.errors import ConfigError

CHUNKS = 16


class Entry(msgspec.Struct, eq=False, gc=False):
    """One block, readable once every rank's share has been filled. The garbage collector does not look at it."""

    key: bytes
    record: int
    filled: int = 0
    """Bit ``r``: the share of rank ``r`` is there."""
    filling: int = 0
    """Bit ``r``: it is being read from a sender, or may still be written by that."""
    pins: int = 0
    """Readers that hold it."""
    used: int = 0
    """When it was last used, in uses of the store."""

    @property
    def idle(self) -> bool:
        """Whether it may be given up."""
        return not self.pins and not self.filling


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks to be filled for one rank: ``entries`` from block ``first`` of the prompt on."""

    rank: int
    first: int
    entries: tuple[Entry, ...]


def require_room(nbytes: int, record_nbytes: int) -> None:
    """Refuse records of which a chunk of a store holds less than two.

    Raises:
        ConfigError: names both sizes.
    """
    if 2 * record_nbytes > nbytes // CHUNKS:
        need = 2 * CHUNKS * record_nbytes
        raise ConfigError(
            f"a block of {record_nbytes} bytes (all layers and ranks) needs a store of at least {need} bytes, this "
            f"one has {nbytes}: raise --capacity, or use smaller store blocks"
        )


@dataclass(slots=True)
class Slabs:
    """Shares the memory among families, chunk by chunk."""

    nbytes: int
    indexes: list[Index] = field(default_factory=list)
    evictions: int = 0
    uses: int = 0
    free: list[int] = field(default_factory=lambda: list(reversed(range(CHUNKS))))

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a chunk."""
        return self.nbytes // CHUNKS

    def take(self, index: Index) -> int | None:
        """Find a chunk for a family; None if it has to make do with what it has."""
        if self.free:
            return self.free.pop()
        found = min(
            (
                (last, other, chunk)
                for other in self.indexes
                if other is not index
                for chunk, last in other.idle_chunks().items()
            ),
            key=lambda each: each[0],
            default=None,
        )
        if found is None:
            return None
        last, other, chunk = found
        oldest = index.oldest_use()
        poor = oldest is None and len(index.chunks) < CHUNKS // len(self.indexes)
        if not poor and (oldest is None or last >= oldest):
            return None
        other.give_up(chunk)
        return chunk

    def forget(self, index: Index) -> None:
        """Take back every chunk of a family that is no more."""
        self.indexes.remove(index)
        self.free += index.chunks


class Index:
    """The blocks of one family. Not thread-safe: the owner locks."""

    def __init__(self, slabs: Slabs, record_nbytes: int, ranks: int) -> None:
        """Hold nothing yet.

        Raises:
            ConfigError: a chunk is too small for records of that size.
        """
        require_room(slabs.nbytes, record_nbytes)
        self._slabs = slabs
        self._record_nbytes = record_nbytes
        self._all = (1 << ranks) - 1
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._visible: dict[bytes, Entry] = {}
        self._by_chunk: dict[int, dict[int, Entry]] = {}
        self._free: list[int] = []
        slabs.indexes.append(self)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def chunks(self) -> list[int]:
        """The chunks this family owns."""
        return list(self._by_chunk)

    @property
    def visible(self) -> int:
        """Count the blocks that can be read."""
        return len(self._visible)

    @property
    def busy(self) -> bool:
        """Whether anything is being read or filled."""
        return not all(entry.idle for entry in self._entries.values())

    def found(self, keys: Sequence[bytes]) -> list[Entry]:
        """Give the blocks of a prompt that can be read, from its first up to the first that cannot."""
        hits = list(map(self._visible.get, keys))
        return hits if all(hits) else hits[: hits.index(None)]  # type: ignore[return-value] # cut at the first None

    def missing(self, keys: Sequence[bytes], rank: int) -> int:
        """Count the blocks whose share of a rank is neither there nor on its way."""
        return sum(not self._has(key, rank) for key in keys)

    def _has(self, key: bytes, rank: int) -> bool:
        entry = self._entries.get(key)
        return entry is not None and bool((entry.filled | entry.filling) >> rank & 1)

    def touch(self, entries: Sequence[Entry]) -> None:
        """Note a use: the end of a prompt goes before its start."""
        move, uses = self._entries.move_to_end, self._slabs.uses + 1
        self._slabs.uses += len(entries)
        for used, entry in enumerate(reversed(entries), uses):
            entry.used = used
            move(entry.key)

    def pin(self, entries: Sequence[Entry]) -> None:
        """Keep blocks until ``unpin``."""
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Let go of them."""
        for entry in entries:
            entry.pins -= 1

    def reserve(self, keys: Sequence[bytes], rank: int) -> Reservation | None:
        """Make room for the first blocks in a row that a rank's share is missing of; None if there is none."""
        first = next((number for number, key in enumerate(keys) if not self._has(key, rank)), len(keys))
        known = [entry for key in keys if (entry := self._entries.get(key)) is not None]
        self.touch(known)
        self.pin(known)  # a prompt must not push itself out
        taken: list[Entry] = []
        may_steal = True
        for key in keys[first:]:
            if self._has(key, rank):
                break
            entry = self._entries.get(key)
            if entry is None:
                record, may_steal = self._allocate(may_steal)
                if record is None:
                    break
                entry = self._entries[key] = Entry(key, record)
                self._by_chunk[self._chunk_of(record)][record] = entry
            entry.filling |= 1 << rank
            taken.append(entry)
        self.unpin(known)
        self.touch(taken)
        return Reservation(rank, first, tuple(taken)) if taken else None

    def settle(self, done: Reservation, *, filled: bool) -> None:
        """End a reservation: nothing writes into it any more."""
        for entry in done.entries:
            entry.filling &= ~(1 << done.rank)
            if filled:
                entry.filled |= 1 << done.rank
                if entry.filled == self._all:
                    self._visible[entry.key] = entry
            elif not entry.filled and not entry.filling:
                self._drop(entry)

    def oldest_use(self) -> int | None:
        """When the block that would go next was used; None if none may go."""
        entry = self._next_to_go()
        return None if entry is None else entry.used

    def idle_chunks(self) -> dict[int, int]:
        """Chunks in which nothing is in use, each with the last use of anything in it."""
        return {
            chunk: max((entry.used for entry in held.values()), default=0)
            for chunk, held in self._by_chunk.items()
            if all(entry.idle for entry in held.values())
        }

    def give_up(self, chunk: int) -> None:
        """Forget everything in a chunk and disown it."""
        for entry in list(self._by_chunk[chunk].values()):
            self._slabs.evictions += 1
            self._drop(entry)
        del self._by_chunk[chunk]
        self._free = [record for record in self._free if self._chunk_of(record) != chunk]

    def _allocate(self, may_steal: bool) -> tuple[int | None, bool]:  # noqa: FBT001 - a private pair
        """Give a free record, if there is one to be had, and whether looking for a chunk again is worth it."""
        if not self._free and may_steal:
            chunk = self._slabs.take(self)
            may_steal = chunk is not None
            if chunk is not None:
                self._own(chunk)
        if not self._free:
            entry = self._next_to_go()
            if entry is not None:
                self._slabs.evictions += 1
                self._drop(entry)
        return (self._free.pop() if self._free else None), may_steal

    def _own(self, chunk: int) -> None:
        size, record = self._slabs.chunk_nbytes, self._record_nbytes
        self._by_chunk[chunk] = {}
        self._free += reversed(range(-(-chunk * size // record), (chunk + 1) * size // record))

    def _chunk_of(self, record: int) -> int:
        return record * self._record_nbytes // self._slabs.chunk_nbytes

    def _next_to_go(self) -> Entry | None:
        return next((entry for entry in self._entries.values() if entry.idle), None)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._visible.pop(entry.key, None)
        del self._by_chunk[self._chunk_of(entry.record)][entry.record]
        self._free.append(entry.record)
