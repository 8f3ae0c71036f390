"""Words, verdicts and the book of leases."""

from __future__ import annotations

import json
import random
from contextlib import suppress

import pytest

from kvrdma.errors import ConfigError, LeaseError
from kvrdma.lease import End, Ended, FenceTable, LeaseBook, LeaseKey, Verdict, judge


@pytest.fixture
def table() -> FenceTable:
    return FenceTable(4, spare=2)


@pytest.fixture
def book(table: FenceTable) -> LeaseBook:
    return LeaseBook(table, lease_s=30)


@pytest.mark.parametrize(
    ("word", "verdict"),
    [
        (7 << 1 | 1, Verdict.LIVE),
        (7 << 1, Verdict.REVOKED),
        (8 << 1 | 1, Verdict.REVOKED),
        (8 << 1, Verdict.REVOKED),
        (6 << 1 | 1, Verdict.NOT_YET),
        (6 << 1, Verdict.NOT_YET),
        (0, Verdict.NOT_YET),
        ((1 << 64) - 1, Verdict.REVOKED),
    ],
)
def test_judge(word: int, verdict: Verdict) -> None:
    assert judge(word, LeaseKey(3, 7)) is verdict


def test_a_word_s_life(table: FenceTable) -> None:
    key = table.allocate()
    assert judge(table.word(key.slot), key) is Verdict.NOT_YET
    table.make_live(key)
    assert table.word(key.slot) == key.generation * 2 + 1
    table.revoke(key)
    assert table.word(key.slot) == key.generation * 2


def test_slots_are_used_in_turn_and_generations_grow(table: FenceTable) -> None:
    keys = [table.allocate() for _ in range(4)]
    assert [key.slot for key in keys] == [0, 1, 2, 3]
    assert [key.generation - keys[0].generation for key in keys] == [0, 1, 2, 3]
    with pytest.raises(LeaseError, match="all 4 leases are taken"):
        table.allocate()
    table.release(keys[2])
    assert table.allocate() == LeaseKey(2, keys[3].generation + 1)


def test_two_processes_start_at_different_generations_that_json_can_carry() -> None:
    first = {FenceTable(1).allocate().generation for _ in range(50)}
    assert len(first) == 50
    for generation in first:
        assert (1 << 32) < generation < (1 << 52)
        assert json.loads(json.dumps(float(generation))) == generation


def test_spare_words_lie_behind_the_table_and_say_nothing(table: FenceTable) -> None:
    assert (len(table), table.spare, table.nbytes) == (4, 2, 48)
    assert table.clear_spare(5) == table.addr + 40
    assert table.word(5) == 0


@pytest.mark.parametrize("slots", [0, -1, (1 << 20) + 1])
def test_a_table_of_an_impossible_size(slots: int) -> None:
    with pytest.raises(ConfigError, match=rf"{slots} lease slots \(KVRDMA_FENCE_SLOTS\)"):
        FenceTable(slots)


def test_done_by_the_only_consumer(book: LeaseBook, table: FenceTable) -> None:
    key = book.publish("r", 0.0)
    assert table.word(key.slot) & 1
    assert book.done(key, "c", 0, [0])
    assert book.take_ended() == [Ended("r", End.DONE)]
    assert book.take_ended() == []
    assert judge(table.word(key.slot), key) is Verdict.REVOKED
    assert len(book) == 0


def test_every_rank_of_every_consumer_counts_once(book: LeaseBook) -> None:
    key = book.publish("r", 0.0, consumers=2)
    assert book.done(key, "a", 1, [0, 1])
    assert not book.done(key, "a", 1, [0, 1])  # again
    assert not book.done(key, "a", 2, [0, 1])  # not one of its readers
    assert book.done(key, "a", 0, [])  # who reads was said before
    assert book.take_ended() == []  # a is done, b is not
    assert book.done(key, "b", 4, [4])
    assert book.take_ended() == [Ended("r", End.DONE)]


def test_the_first_message_of_a_consumer_says_who_reads(book: LeaseBook) -> None:
    key = book.publish("r", 0.0)
    assert book.done(key, "a", 0, [0, 1])
    assert not book.done(key, "a", 0, [0])  # cannot shrink the readers afterwards
    assert book.take_ended() == []
    assert book.done(key, "a", 1, [7])
    assert book.take_ended() == [Ended("r", End.DONE)]


def test_messages_about_anything_else_change_nothing(book: LeaseBook) -> None:
    key = book.publish("r", 0.0)
    for other in (
        LeaseKey(key.slot, key.generation - 1),
        LeaseKey(key.slot, key.generation + 1),
        LeaseKey(99, key.generation),
        LeaseKey(3, 0),
    ):
        assert not book.done(other, "a", 0, [0])
        assert book.renew([other], 10.0) == 0
    assert "r" in book
    assert book.take_ended() == []


def test_expiry_is_renewed_and_skips_no_one(book: LeaseBook) -> None:
    keys = [book.publish(name, float(at)) for at, name in enumerate("abc")]
    assert book.next_deadline_s() == 30.0
    assert book.renew([keys[0], keys[0]], 20.0) == 2
    book.expire(31.5)  # a lives until 50; b ends; c at 32 does not yet
    assert book.take_ended() == [Ended("b", End.EXPIRED)]
    book.expire(32.0)
    assert book.take_ended() == [Ended("c", End.EXPIRED)]
    book.expire(49.9)
    assert "a" in book
    book.expire(50.0)
    book.expire(50.0)
    assert book.take_ended() == [Ended("a", End.EXPIRED)]
    assert book.next_deadline_s() is None


def test_a_late_heartbeat_never_shortens_a_lease(book: LeaseBook) -> None:
    key = book.publish("r", 100.0)
    book.renew([key], 50.0)
    assert book.next_deadline_s() == 130.0


def test_withdrawn_once(book: LeaseBook) -> None:
    book.publish("r", 0.0)
    assert book.withdraw("r")
    assert not book.withdraw("r")
    assert book.take_ended() == [Ended("r", End.WITHDRAWN)]
    book.publish("s", 0.0)
    book.publish("t", 0.0)
    book.withdraw_all()
    assert [end.request_id for end in book.take_ended()] == ["s", "t"]


def test_a_request_is_published_once_at_a_time(book: LeaseBook) -> None:
    book.publish("r", 0.0)
    with pytest.raises(LeaseError, match="'r' is published already"):
        book.publish("r", 0.0)
    book.withdraw("r")
    book.publish("r", 0.0)


def test_at_least_one_consumer(book: LeaseBook) -> None:
    with pytest.raises(LeaseError, match="consumers=0"):
        book.publish("r", 0.0, consumers=0)


# Ranks that take another rank's lease


def test_an_early_message_counts_when_its_lease_comes(book: LeaseBook) -> None:
    key = LeaseKey(2, 1000)
    for _ in range(3):  # duplicates take no room
        assert not book.done(key, "a", 0, [0, 1])
    assert book.remembered == 3
    assert book.publish("r", 0.0, key=key) == key
    assert book.remembered == 0
    assert book.take_ended() == []
    book.done(key, "a", 1, [0, 1])
    assert book.take_ended() == [Ended("r", End.DONE)]


def test_nobody_can_be_done_early_with_a_lease_of_our_own(book: LeaseBook, table: FenceTable) -> None:
    guess = LeaseKey(0, table.allocate().generation + 1)
    table.release(LeaseKey(0, guess.generation - 1))
    for slot in range(4):
        book.done(LeaseKey(slot, guess.generation), "guesser", 0, [0])
    key = book.publish("r", 0.0)
    assert key.generation == guess.generation
    assert "r" in book


def test_a_slot_taken_for_another_rank_is_not_allocated(book: LeaseBook, table: FenceTable) -> None:
    theirs = LeaseKey(0, table.allocate().generation + 50)
    table.release(LeaseKey(0, 0))
    book.publish("theirs", 0.0, key=theirs)
    mine = [book.publish(name, 0.0) for name in "abc"]
    assert sorted(key.slot for key in mine) == [1, 2, 3]
    assert judge(table.word(0), theirs) is Verdict.LIVE
    assert min(key.generation for key in mine) > theirs.generation
    book.withdraw("theirs")
    assert book.publish("d", 0.0).slot == 0


def test_a_newer_lease_in_a_slot_ends_the_older(book: LeaseBook, table: FenceTable) -> None:
    book.publish("old", 0.0, key=LeaseKey(1, 500))
    book.publish("new", 0.0, key=LeaseKey(1, 501))
    assert book.take_ended() == [Ended("old", End.EXPIRED)]
    assert judge(table.word(1), LeaseKey(1, 500)) is Verdict.REVOKED
    assert judge(table.word(1), LeaseKey(1, 501)) is Verdict.LIVE
    for key in (LeaseKey(1, 500), LeaseKey(1, 501)):
        with pytest.raises(LeaseError, match="has ended already, or its slot is taken"):
            book.publish("late", 0.0, key=key)
    with pytest.raises(LeaseError, match="slot 9 of 4 does not exist"):
        book.publish("nowhere", 0.0, key=LeaseKey(9, 501))


def test_an_ended_lease_is_not_opened_again(book: LeaseBook) -> None:
    book.publish("r", 0.0, key=LeaseKey(1, 500))
    book.withdraw("r")
    with pytest.raises(LeaseError, match="has ended already"):
        book.publish("r", 0.0, key=LeaseKey(1, 500))


def test_a_goodbye_counts_for_every_lease_the_rank_reads(book: LeaseBook) -> None:
    key = book.publish("r", 0.0)
    book.publish("s", 0.0)
    book.done(key, "a", 0, [0, 1])
    book.forget_consumer("a", 1)
    assert book.take_ended() == [Ended("r", End.DONE)]
    assert "s" in book


# Bounds


def test_invented_early_messages_stay_bounded() -> None:
    book = LeaseBook(FenceTable(4096), 30)
    for number in range(200_000):
        book.done(LeaseKey(number % 4096, (1 << 60) + number), f"c{number}", 0, [0, 1, 2])
    assert 65_536 - 4 <= book.remembered <= 65_536


def test_invented_consumers_of_a_live_lease_stay_bounded(book: LeaseBook) -> None:
    key = book.publish("r", 0.0)
    taken = sum(book.done(key, f"c{n}", 0, range(100)) for n in range(5_000))
    assert taken == 65  # the one expected and 64 others
    assert not book.done(key, "z", 0, range(20_000))
    assert "r" in book


def test_the_oldest_lease() -> None:
    book = LeaseBook(FenceTable(4), 30.0)
    assert book.oldest_s(5.0) == 0.0
    book.publish("first", 1.0)
    book.publish("second", 3.0)
    assert book.oldest_s(5.0) == 4.0
    book.withdraw("first")
    assert book.oldest_s(5.0) == 2.0


# Leases that other ranks allocated, prepared ahead


def test_a_newer_prepared_lease_takes_the_slot_from_one_that_was_never_published(
    book: LeaseBook, table: FenceTable
) -> None:
    old, new = LeaseKey(2, 7 << 20), LeaseKey(2, (7 << 20) + 1)
    book.prepare(old)
    book.done(old, "reader", 0, [0])
    book.prepare(new)
    assert book.remembered == 0, "of the old one"
    book.discard(old)  # late: says nothing of the new one
    assert judge(table.word(2), new) is Verdict.LIVE
    with pytest.raises(LeaseError, match="has ended already, or its slot is taken"):
        book.publish("old", 0.0, key=old)
    assert judge(table.word(2), old) is Verdict.REVOKED
    assert book.publish("new", 0.0, key=new) == new
    others = [table.allocate().slot for _ in range(3)]
    assert 2 not in others
    book.expire(31.0)
    assert book.take_ended() == [Ended("new", End.EXPIRED)]
    assert table.allocate().slot == 2


def test_a_lease_is_named_by_its_key(book: LeaseBook) -> None:
    for other in ((1, 1 << 60), "ab", 5):
        for call in (book.prepare, book.discard, lambda key: book.publish("a", 0.0, key=key)):
            with pytest.raises(LeaseError, match="a lease is named by a LeaseKey"):
                call(other)  # type: ignore[arg-type]


def test_words_of_a_slot_never_go_back(book: LeaseBook, table: FenceTable) -> None:
    """Random orders of what ranks ask for, with keys of three requests that share a slot."""
    rng = random.Random(3)
    for _ in range(2000):
        keys = [LeaseKey(1, table.word(1) // 2 + (1 << 20) + number) for number in range(3)]
        highest = table.word(1)
        for _ in range(8):
            key, step = rng.choice(keys), rng.choice(("prepare", "publish", "discard", "withdraw"))
            with suppress(LeaseError):
                if step == "publish":
                    book.publish(key, 0.0, key=key)
                else:
                    getattr(book, step)(key)
            word = table.word(1)
            assert word >= highest - 1, "a revoked word of the same generation is one less"
            assert word >> 1 >= highest >> 1
            highest = max(highest, word)
        book.withdraw_all()
        book.take_ended()
        assert len(book) == 0
        assert [key in book for key in keys] == [False] * 3
        free = [table.allocate() for _ in range(4)]
        for each in free:
            table.release(each)


@pytest.mark.parametrize("where", ["make_live", "_open"])
def test_a_handler_that_raises_in_the_middle_of_publish_leaves_nothing_behind(
    book: LeaseBook, table: FenceTable, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: object = table if where == "make_live" else book
    real = getattr(owner, where)

    def interrupted(*arguments: object) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            book.publish("a", 0.0)
    assert (len(book), "a" in book) == (0, False)
    assert {table.word(slot) & 1 for slot in range(4)} == {0}
    assert len({book.publish(name, 0.0) for name in "abcd"}) == 4
