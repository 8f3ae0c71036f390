"""``Shelf``: everything a store holds, behind one lock: families, their blocks, and who holds which.

The side channel's thread looks things up here, the filling thread puts things in; nobody waits for data, a peer or a
disk under the lock.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvrdma.config import Config
from kvrdma.engine import Ended, Event, PullDone, PullFailed, PullReleased
from kvrdma.engine.peers import Sparing
from kvrdma.errors import ConfigError, LeaseError, PlanError
from kvrdma.store.geometry import Family, decode_family, fingerprint, record_nbytes
from kvrdma.store.index import CHUNKS, Entry, Index, Reservation, Slabs
from kvrdma.store.keys import split_keys
from kvrdma.store.members import Fill, Members
from kvrdma.store.numbers import Numbers
from kvrdma.wire import StoreFound, StoreLookup, StoreOffer

MIN_CAPACITY = 1 << 16
_WARN_EVERY_S = 10.0
_log = logging.getLogger(__name__)
_NOTHING = StoreFound(0, 0)


@dataclass(slots=True, eq=False)
class Stock:
    """One family: its blocks and its engines."""

    text: bytes
    members: Members
    index: Index
    used: int = 0


@dataclass(slots=True)
class Held:
    """What one lookup holds, until every rank's lease has ended."""

    stock: Stock
    entries: Sequence[Entry]
    ranks: int
    noted: bool = False
    """Its blocks were moved to the end of those that may go."""

    def note(self) -> None:
        """Do so, once."""
        if not self.noted:
            self.noted = True
            self.stock.index.touch(self.entries)


@dataclass(slots=True)
class Filling:
    """What one offer fills."""

    stock: Stock
    reservation: Reservation
    nbytes: int


class Shelf:
    """A bounded amount of memory and what lies in it. Thread-safe."""

    def __init__(self, capacity: int, max_families: int, config: Config) -> None:
        """Reserve ``capacity`` bytes, for at most ``max_families`` families at a time.

        Raises:
            ConfigError: it is too little, or more than there is.
        """
        if capacity < MIN_CAPACITY or max_families < 1:
            raise ConfigError(
                f"a store needs {MIN_CAPACITY} bytes and one family at least, got {capacity} bytes, {max_families}"
            )
        self.capacity = capacity - capacity % (64 * CHUNKS)
        self.max_families = max_families
        self.config = config
        self.numbers = Numbers()
        self._arena = _reserve(self.capacity)
        self._slabs = Slabs(self.capacity)
        self._lock = threading.RLock()
        self._stocks: dict[bytes, Stock] = {}
        self._by_print: dict[bytes, list[Stock]] = {}
        self._held: dict[int, Held] = {}
        self._fillings: dict[Hashable, Filling] = {}
        self._lease = 0
        self._uses = 0
        self._warn = Sparing(_WARN_EVERY_S)

    # Families

    def stock(self, text: bytes) -> Stock | None:
        """Give a family's stock, if the store has met it."""
        with self._lock:
            found = self._stocks.get(text)
            if found is not None:
                self._use(found)
            return found

    def open_stock(self, text: bytes) -> Stock:
        """Open a new family; only the filling thread may. Takes some tens of milliseconds, without the lock.

        Raises:
            ConfigError: there are too many, all in use, or its blocks are too large for this store.
            KVRDMAError: its engines cannot be opened.
        """
        family = decode_family(text)
        self._make_way()
        with self._lock:
            index = Index(self._slabs, record_nbytes(family), family.ranks)
        try:
            members = Members(family, self._arena, self.config)
        except BaseException:
            with self._lock:
                self._slabs.forget(index)
            raise
        stock = Stock(text, members, index)
        with self._lock:
            self._stocks[text] = stock
            self._by_print.setdefault(fingerprint(family), []).append(stock)
            self._use(stock)
        return stock

    def _use(self, stock: Stock) -> None:
        self._uses += 1
        stock.used = self._uses

    def _make_way(self) -> None:
        """Close the family that was used longest ago, if there are too many."""
        with self._lock:
            if len(self._stocks) < self.max_families:
                return
            idle = [stock for stock in self._stocks.values() if not stock.index.busy]
            if not idle:
                raise ConfigError(
                    f"this store serves {self.max_families} kinds of caches at a time, all of them in use: raise "
                    "--max-families, or give senders the same model, split and block size"
                )
            oldest = min(idle, key=lambda stock: stock.used)
            self._remove(oldest)
        oldest.members.close()

    def _remove(self, stock: Stock) -> None:
        del self._stocks[stock.text]
        key = fingerprint(stock.members.family)
        self._by_print[key].remove(stock)
        if not self._by_print[key]:
            del self._by_print[key]
        self._slabs.forget(stock.index)
        self.numbers.evicted += len(stock.index)

    def stocks(self) -> list[Stock]:
        """List the families."""
        with self._lock:
            return list(self._stocks.values())

    # Readers

    def lookup(self, asked: StoreLookup) -> StoreFound:
        """Find the longest beginning of a prompt that is there, and hold it.

        Raises:
            PlanError: the keys are malformed.
        """
        keys = split_keys(asked.keys)
        self.follow_up()  # a sender that has heard that its blocks were read may look them up at once
        with self._lock:
            self.numbers.lookups += 1
            self.numbers.looked_up += len(keys)
            best: tuple[list[Entry], Stock] | None = None
            for stock in self._by_print.get(asked.fingerprint, ()):
                entries = stock.index.found(keys)
                if entries and (best is None or len(entries) > len(best[0])):
                    best = entries, stock
            if best is None:
                return _NOTHING
            entries, stock = best
            tokens = min(len(entries) * stock.members.family.block_tokens, asked.num_tokens)
            self._use(stock)
            if not asked.hold:
                stock.index.touch(entries)
                return StoreFound(len(entries), tokens)
            return self._hold(stock, entries, tokens)

    def _hold(self, stock: Stock, entries: list[Entry], tokens: int) -> StoreFound:
        lease = self._lease + 1
        try:
            reference = stock.members.publish(lease, [entry.record for entry in entries], tokens)
        except LeaseError:
            self.numbers.refused += 1
            stock.index.touch(entries)
            return _NOTHING
        self._lease = lease
        stock.index.pin(entries)
        self._held[lease] = Held(stock, entries, len(stock.members.engines))
        self.numbers.hits += len(entries)
        return StoreFound(len(entries), tokens, lease, msgspec.msgpack.encode(reference.to_params()))

    def release(self, lease: int) -> None:
        """End what a lookup holds; harmless if it has ended. It is free once the engines say so."""
        with self._lock:
            held = self._held.get(lease)
            if held is not None:
                held.stock.members.withdraw(lease)
                self.follow_up()  # now: else the next lookup does it first

    def _lease_ended(self, lease: Hashable) -> None:
        """Note that one rank's lease of a lookup has ended."""
        held = self._held.get(lease)  # type: ignore[call-overload]
        if held is None:
            return
        held.ranks -= 1
        if not held.ranks:
            del self._held[lease]  # type: ignore[arg-type]
            held.stock.index.unpin(held.entries)
            held.note()

    # Both

    def follow_up(self) -> None:
        """Do what follows from what the engines have reported."""
        with self._lock:
            for stock in self._stocks.values():
                for engine in stock.members.engines:
                    if engine.ended:
                        for event in engine.poll():
                            self._follow(event)

    def _follow(self, event: Event) -> None:
        if isinstance(event, Ended):
            self._lease_ended(event.request_id)
        elif isinstance(event, PullDone):
            self.filled(event.request_id, succeeded=True)
        elif isinstance(event, PullReleased):
            self.filled(event.request_id, succeeded=False)
        elif isinstance(event, PullFailed):
            if self._warn("fill", time.monotonic()):
                _log.warning("store: blocks on offer could not be read: %s", event.reason)
            if not event.quarantined:  # otherwise something may still write there
                self.filled(event.request_id, succeeded=False)

    # Senders

    def missing(self, offer: StoreOffer) -> int:
        """Count the blocks of an offer that are not there, as far as is known.

        Raises:
            PlanError: the keys or numbers are malformed.
        """
        keys = split_keys(offer.keys)
        stock = self.stock(offer.family)
        if stock is None:
            return len(keys)
        _check_offer(offer, stock.members.family, len(keys))
        with self._lock:
            return stock.index.missing(keys, offer.rank)

    def reserve(self, name: Hashable, stock: Stock, offer: StoreOffer) -> Fill | None:
        """Make room for an offer's missing blocks; None if there is nothing to fill or no room.

        Raises:
            PlanError: the keys or numbers are malformed.
        """
        keys, family = split_keys(offer.keys), stock.members.family
        _check_offer(offer, family, len(keys))
        with self._lock:
            for held in self._held.values():  # not by the lookup, whose reader waits: nothing held can go
                held.note()
            before = self._slabs.evictions
            made = stock.index.reserve(keys, offer.rank)
            self.numbers.evicted += self._slabs.evictions - before
            if made is None:
                return None
            end = min((made.first + len(made.entries)) * family.block_tokens, offer.num_tokens)
            share = record_nbytes(family) // family.ranks * len(made.entries)
            self._fillings[name] = Filling(stock, made, share)
            return Fill(made.rank, made.first, [entry.record for entry in made.entries], end)

    def filled(self, name: Hashable, *, succeeded: bool) -> None:
        """End a filling: from now on nothing writes there. Its blocks can be read if it succeeded."""
        with self._lock:
            filling = self._fillings.pop(name, None)
            if filling is None:
                return
            filling.stock.index.settle(filling.reservation, filled=succeeded)
            if succeeded:
                self.numbers.filled += len(filling.reservation.entries)
                self.numbers.filled_bytes += filling.nbytes
            else:
                self.numbers.fills_failed += 1

    # Looking

    def sizes(self) -> dict[str, float]:
        """Give what it holds now."""
        with self._lock:
            used = sum(len(stock.index) * record_nbytes(stock.members.family) for stock in self._stocks.values())
            return {
                "capacity_bytes": self.capacity,
                "used_bytes": used,
                "blocks": sum(stock.index.visible for stock in self._stocks.values()),
                "families": len(self._stocks),
                "held": len(self._held),
                "filling": len(self._fillings),
            }

    def close(self) -> None:
        """Close every family's engines: nothing of it can be read any more."""
        with self._lock:
            stocks = list(self._stocks.values())
            self._stocks.clear()
            self._by_print.clear()
        closing = [threading.Thread(target=stock.members.close, daemon=True) for stock in stocks]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        with self._lock:
            self._fillings.clear()  # what was being read into them has ended with the engines


def _reserve(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        memory = mmap.mmap(-1, nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"a store of {nbytes} bytes does not fit into memory: {error}") from None
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _check_offer(offer: StoreOffer, family: Family, keys: int) -> None:
    if offer.rank >= family.ranks or keys != -(-offer.num_tokens // family.block_tokens):
        raise PlanError(
            f"an offer of rank {offer.rank} of {family.ranks} with {keys} keys for {offer.num_tokens} tokens in blocks "
            f"of {family.block_tokens} does not add up"
        )
