"""Success implies that the bytes were the request's own: every interleaving of one small world, many of a bigger one.

The worlds are made of the real ``LeaseBook``, ``FenceTable`` and ``judge``, and of a memory that is a list. Each
check has its negative controls: a protocol with one step missing or out of order has to be caught.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrdma.lease import FenceTable, LeaseBook, LeaseKey, Verdict, judge

LEASE_S = 2.0
LAST_S = 4.0
PROTOCOL = ("word", "read 0", "read 1", "word", "tell")
KEY, NEXT = LeaseKey(0, 100), LeaseKey(0, 101)


class LateRevoke(LeaseBook):
    """A wrong book: it says that blocks are free, and revokes the word some time later."""

    def _end(self, key: LeaseKey, how: object) -> None:
        live = self._table.word(key.slot)
        super()._end(key, how)  # type: ignore[arg-type]
        self._table._words[key.slot] = live


def clone(book: LeaseBook) -> LeaseBook:
    """Copy a book and its table."""
    table: FenceTable = object.__new__(FenceTable)
    old = book._table
    table._slots, table._generation = old._slots, old._generation
    table._words, table._free = old._words.copy(), OrderedDict(old._free)
    table._view = table._words.data
    new: LeaseBook = object.__new__(type(book))
    new._table, new._lease_s = table, book._lease_s
    new._leases = {
        key: replace(lease, readers=dict(lease.readers), done=set(lease.done)) for key, lease in book._leases.items()
    }
    new._keys, new._by_slot, new._prepared = dict(book._keys), dict(book._by_slot), dict(book._prepared)
    new._early = OrderedDict((key, dict(value)) for key, value in book._early.items())
    new._early_size, new._ended = book._early_size, list(book._ended)
    return new


@dataclass(frozen=True)
class Consumer:
    """One consumer: where it is in its protocol, what it has read, what came of it."""

    step: int = 0
    read: tuple[str, ...] = ()
    outcome: str = ""


@dataclass
class World:
    """One block of two halves and one lease slot: request A is published, ends, and B reuses both."""

    book: LeaseBook
    protocol: tuple[str, ...] = PROTOCOL
    script: tuple[Callable[[World], None], ...] = ()
    told: int = 0
    """How far the producer is when its consumers hear of the lease."""
    memory: tuple[str, str] = ("old", "old")
    producer: int = 0
    now_s: float = 0.0
    free: bool = False
    consumers: tuple[Consumer, ...] = (Consumer(), Consumer())

    def copy(self) -> World:
        return replace(self, book=clone(self.book))

    def key(self) -> object:
        leases = tuple(
            (key, lease.deadline_s, frozenset(lease.done), frozenset(lease.readers.items()))
            for key, lease in self.book._leases.items()
        )
        early = tuple((key, frozenset(value.items())) for key, value in self.book._early.items())
        early += tuple((key, frozenset()) for key in self.book._prepared.values())
        word = self.book._table.word(0)
        return word, leases, early, self.memory, self.producer, self.now_s, self.free, self.consumers

    def moves(self) -> Iterator[Callable[[World], None]]:
        """Everything that may happen next, each on a copy of this world."""
        if self.producer < len(self.script):
            yield self.script[self.producer]
        if "A" in self.book:
            yield lambda world: world.end(lambda: world.book.withdraw("A"))
        if self.now_s < LAST_S:
            yield World.tick
        if isinstance(self.book, LateRevoke):
            yield lambda world: world.book._table.revoke(KEY) if world.free and world.producer < 6 else None
        for index, consumer in enumerate(self.consumers if self.producer >= self.told else ()):
            if consumer.step < len(self.protocol):
                yield lambda world, index=index: world.advance(index)  # type: ignore[misc]
            yield lambda world: world.beat()
            if consumer.outcome == "" and consumer.step == 0:
                yield lambda world, index=index: world.tell(index)  # type: ignore[misc]

    def end(self, how: Callable[[], object]) -> None:
        how()
        ended = self.book.take_ended()
        assert len([end for end in ended if end.request_id == "A"]) + self.free <= 1, "reported twice"
        self.free = self.free or any(end.request_id == "A" for end in ended)

    def tick(self) -> None:
        self.now_s += 1
        self.end(lambda: self.book.expire(self.now_s))

    def beat(self) -> None:
        self.book.renew([KEY], self.now_s)

    def tell(self, index: int) -> None:
        """Say done, in order, early, late or twice."""
        self.end(lambda: self.book.done(KEY, f"c{index}", 0, [0]))

    def advance(self, index: int) -> None:
        consumer = self.consumers[index]
        step = self.protocol[consumer.step]
        if step == "tell":
            self.tell(index)
            new = replace(consumer, step=consumer.step + 1, outcome=consumer.outcome or self.judged(consumer))
        elif step == "word":
            new = self.look(consumer)
        else:
            new = replace(consumer, step=consumer.step + 1, read=(*consumer.read, self.memory[int(step[-1])]))
        self.consumers = tuple(new if i == index else other for i, other in enumerate(self.consumers))

    def look(self, consumer: Consumer) -> Consumer:
        verdict = judge(self.book._table.word(KEY.slot), KEY)
        if verdict is Verdict.LIVE:
            return replace(consumer, step=consumer.step + 1)
        if verdict is Verdict.NOT_YET and (not consumer.read or self.protocol[0] != "word"):
            return consumer  # look again
        return replace(consumer, step=len(self.protocol) - 1, outcome="revoked")

    def judged(self, consumer: Consumer) -> str:
        return "success" if consumer.read == ("A", "A") else f"WRONG {consumer.read}"


def write(half: int, what: str) -> Callable[[World], None]:
    def move(world: World) -> None:
        memory = list(world.memory)
        memory[half] = what
        world.memory = (memory[0], memory[1])
        world.producer += 1

    return move


def publish_a(world: World) -> None:
    world.end(lambda: world.book.publish("A", world.now_s, consumers=2, key=KEY))
    world.producer += 1


def reuse(world: World) -> None:
    """B may begin only when A's end was reported."""
    if world.free:
        world.producer += 1


def publish_b(world: World) -> None:
    world.end(lambda: world.book.publish("B", world.now_s, key=NEXT))
    world.producer += 1


def prepare_a(world: World) -> None:
    world.book.prepare(KEY)
    world.producer += 1


def tell_of_a(world: World) -> None:
    world.producer += 1


PRODUCER = (write(0, "A"), write(1, "A"), publish_a, reuse, write(0, "B"), write(1, "B"), publish_b)
PREPARED = (prepare_a, write(0, "A"), write(1, "A"), tell_of_a, *PRODUCER[2:])
Found: TypeAlias = dict[str, int]


def explore(
    book: type[LeaseBook] = LeaseBook,
    protocol: tuple[str, ...] = PROTOCOL,
    consumers: int = 2,
    script: tuple[Callable[[World], None], ...] = PRODUCER,
    told: int = 0,
) -> Found:
    """Visit every state that can be reached; count the outcomes that occur in them."""
    start = World(book(FenceTable(1), LEASE_S), protocol, script, told, consumers=(Consumer(),) * consumers)
    seen, todo, outcomes = {start.key()}, [start], dict[str, int]()
    while todo:
        world = todo.pop()
        for consumer in world.consumers:
            outcomes[consumer.outcome] = outcomes.get(consumer.outcome, 0) + 1
        for move in world.moves():
            after = world.copy()
            move(after)
            if (key := after.key()) not in seen:
                seen.add(key)
                todo.append(after)
    outcomes["states"] = len(seen)
    return outcomes


def test_no_interleaving_of_two_consumers_serves_a_wrong_byte() -> None:
    found = explore()
    assert {name for name in found if name.startswith("WRONG")} == set()
    assert found["success"] > 1000
    assert found["revoked"] > 1000
    assert found["states"] > 5_000


@pytest.mark.parametrize(
    ("protocol", "wrong"),
    [
        (("read 0", "read 1", "word", "tell"), ("old", "old")),  # read before the producer had published
        (("read 0", "word", "read 1", "tell"), ("A", "B")),
        (("word", "read 0", "read 1", "tell"), ("B", "B")),  # read after the blocks were reused
    ],
)
def test_without_a_look_before_and_after_the_checker_finds_wrong_bytes(
    protocol: tuple[str, ...], wrong: tuple[str, str]
) -> None:
    assert explore(protocol=protocol, consumers=1)[f"WRONG {wrong}"] > 0


def test_one_look_is_enough_where_the_word_was_live_before_anybody_was_told() -> None:
    found = explore(protocol=("read 0", "read 1", "word", "tell"), script=PREPARED, told=4)
    assert {name for name in found if name.startswith("WRONG")} == set()
    assert found["success"] > 500
    assert found["revoked"] > 100


def test_the_checker_finds_a_reference_given_out_before_the_kv_is_there() -> None:
    found = explore(protocol=("read 0", "read 1", "word", "tell"), script=PREPARED, told=2, consumers=1)
    assert found["WRONG ('A', 'old')"] > 0


def test_the_checker_finds_a_word_revoked_after_its_blocks_were_freed() -> None:
    assert {name for name in explore(LateRevoke, consumers=1) if name.startswith("WRONG")} != set()


# A bigger world at random


@dataclass
class Pool:
    """Requests that come and go in few blocks and fewer lease slots; consumers that read as slowly as they like."""

    book: LeaseBook = field(default_factory=lambda: LeaseBook(FenceTable(3), LEASE_S))
    memory: list[int] = field(default_factory=lambda: [-1] * 4)
    free: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    live: dict[int, tuple[LeaseKey, list[int]]] = field(default_factory=dict)
    readers: list[list[object]] = field(default_factory=list)
    now_s: float = 0.0
    requests: int = 0
    good: int = 0
    late: int = 0

    def publish(self) -> None:
        if len(self.free) < 2 or len(self.book) == 3:
            return
        blocks = [self.free.pop(0), self.free.pop(0)]
        self.requests += 1
        for block in blocks:
            self.memory[block] = self.requests
        key = self.book.publish(self.requests, self.now_s)
        self.live[self.requests] = key, blocks
        self.readers += [[self.requests, key, blocks, step, []] for step in (0, 0)]

    def collect(self) -> None:
        for end in self.book.take_ended():
            assert isinstance(end.request_id, int)
            self.free += self.live.pop(end.request_id)[1]

    def read(self, which: int) -> None:
        if not self.readers:
            return
        reader = self.readers[which % len(self.readers)]
        request, key, blocks, step, got = reader
        assert isinstance(key, LeaseKey)
        assert isinstance(blocks, list)
        assert isinstance(step, int)
        assert isinstance(got, list)
        if step in {0, 3} and judge(self.book._table.word(key.slot), key) is not Verdict.LIVE:
            self.late += 1
            self.readers.remove(reader)
            return
        if step in {1, 2}:
            got.append(self.memory[blocks[step - 1]])
        if step == 3:
            assert got == [request, request]
            self.good += 1
            self.readers.remove(reader)
            self.book.done(key, f"c{which}", 0, [0])
        reader[3] = step + 1

    def tick(self) -> None:
        self.now_s += 1
        self.book.expire(self.now_s)

    def beat(self, which: int) -> None:
        if self.readers:
            key = self.readers[which % len(self.readers)][1]
            assert isinstance(key, LeaseKey)
            self.book.renew([key], self.now_s)


ACTIONS = st.tuples(st.sampled_from("pprrrrrrrrtbc"), st.integers(0, 7))


@settings(max_examples=400, deadline=None)
@given(st.lists(ACTIONS, max_size=120))
def test_success_implies_own_bytes(actions: list[tuple[str, int]]) -> None:
    pool = Pool()
    for what, which in actions:
        match what:
            case "p":
                pool.publish()
            case "r":
                pool.read(which)
            case "t":
                pool.tick()
            case "b":
                pool.beat(which)
            case _:
                pool.collect()
    pool.now_s += 2 * LEASE_S
    pool.book.expire(pool.now_s)
    pool.collect()
    assert sorted(pool.free) == [0, 1, 2, 3]
    assert pool.live == {}
    assert len(pool.book) == 0
