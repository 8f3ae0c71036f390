"""The index: against a slow model of what may be seen, kept and given up."""

from __future__ import annotations

import itertools
import random

import pytest

from kvrdma.errors import ConfigError
from kvrdma.store.index import CHUNKS, Entry, Index, Reservation, Slabs

RECORD = 8
PER_CHUNK = 2


def slabs() -> Slabs:
    return Slabs(CHUNKS * PER_CHUNK * RECORD)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def fill(index: Index, *numbers: int, rank: int = 0) -> int:
    """Fill blocks; gives how many."""
    made = index.reserve(keys(*numbers), rank)
    if made is None:
        return 0
    index.settle(made, filled=True)
    return len(made.entries)


def found(index: Index, *numbers: int) -> int:
    return len(index.found(keys(*numbers)))


def test_blocks_are_seen_when_they_are_whole() -> None:
    index = Index(slabs(), RECORD, 2)
    one = index.reserve(keys(1, 2, 3), 0)
    assert one is not None
    assert found(index, 1) == 0
    index.settle(one, filled=True)
    assert found(index, 1) == 0  # the other rank's share is missing
    assert index.missing(keys(1, 2, 3), 0) == 0
    assert index.missing(keys(1, 2, 3), 1) == 3
    assert fill(index, 1, 2, rank=1) == 2
    assert found(index, 1, 2, 3) == 2
    assert found(index, 9, 1) == 0
    assert index.visible == 2


def test_ranks_share_a_record() -> None:
    index = Index(slabs(), RECORD, 2)
    one, two = index.reserve(keys(1), 0), index.reserve(keys(1), 1)
    assert one is not None
    assert two is not None
    assert one.entries[0] is two.entries[0]
    index.settle(one, filled=False)
    index.settle(two, filled=True)
    assert found(index, 1) == 0
    assert index.missing(keys(1), 0) == 1


def test_what_is_on_its_way_is_not_fetched_twice() -> None:
    index = Index(slabs(), RECORD, 1)
    made = index.reserve(keys(1, 2), 0)
    assert made is not None
    assert index.reserve(keys(1, 2), 0) is None
    more = index.reserve(keys(1, 2, 3), 0)
    assert more is not None
    assert (more.first, len(more.entries)) == (2, 1)
    index.settle(made, filled=False)
    assert index.missing(keys(1, 2, 3), 0) == 2
    assert len(index) == 1


def test_the_first_gap_is_filled_first() -> None:
    index = Index(slabs(), RECORD, 1)
    fill(index, 1, 2, 3, 4)
    for entry in index.found(keys(1, 2, 3, 4))[1:2]:
        index.settle(Reservation(0, 1, (entry,)), filled=False)
        entry.filled = 0
    made = index.reserve(keys(1, 2, 3, 4, 5), 0)
    assert made is not None
    assert (made.first, len(made.entries)) == (1, 1)


def test_the_end_of_the_oldest_prompt_goes_first() -> None:
    index = Index(slabs(), RECORD, 1)
    total = CHUNKS * PER_CHUNK
    assert fill(index, *range(total)) == total
    assert fill(index, 100, 101) == 2
    assert found(index, *range(total)) == total - 2
    index.touch(index.found(keys(0, 1, 2)))
    assert fill(index, *range(200, 200 + total - 5)) == total - 5
    assert found(index, 0, 1, 2) == 3
    assert found(index, 3) == 0


def test_a_prompt_longer_than_the_store_keeps_its_beginning() -> None:
    index = Index(slabs(), RECORD, 1)
    total = CHUNKS * PER_CHUNK
    assert fill(index, *range(total + 10)) == total
    assert found(index, *range(total + 10)) == total
    assert fill(index, *range(total + 10)) == 0  # it does not push itself out


def test_what_is_read_or_filled_stays() -> None:
    index = Index(slabs(), RECORD, 1)
    total = CHUNKS * PER_CHUNK
    fill(index, *range(total - 1))
    held = index.found(keys(*range(total - 1)))
    index.pin(held)
    filling = index.reserve(keys(500), 0)
    assert filling is not None
    assert fill(index, 600) == 0
    assert index.busy
    index.unpin(held)
    assert fill(index, 600) == 1
    index.settle(filling, filled=True)
    assert found(index, 500) == 1
    assert not index.busy


def test_records_too_large_for_a_chunk_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a store of at least 288 bytes, this one has 256"):
        Index(slabs(), RECORD + 1, 1)


def test_families_share_by_age() -> None:
    memory = slabs()
    one = Index(memory, RECORD, 1)
    fill(one, *range(CHUNKS * PER_CHUNK))
    two = Index(memory, RECORD, 1)
    assert fill(two, *range(20)) == CHUNKS * PER_CHUNK // 2  # its share
    assert fill(two, 100, 101) == 2  # beyond it, while the other's blocks are older
    assert found(two, *range(16)) == 16
    left = found(one, *range(CHUNKS * PER_CHUNK))
    assert left == 14
    one.touch(one.found(keys(*range(left))))
    assert fill(two, 200, 201) == 2  # now its own are the oldest
    assert found(one, *range(left)) == left
    assert found(two, *range(16)) == 14


def test_a_family_that_ends_gives_its_chunks_back() -> None:
    memory = slabs()
    one = Index(memory, RECORD, 1)
    fill(one, *range(CHUNKS * PER_CHUNK))
    memory.forget(one)
    assert len(memory.free) == CHUNKS
    assert fill(Index(memory, RECORD, 1), *range(100)) == CHUNKS * PER_CHUNK


def test_records_of_families_of_odd_sizes_never_overlap() -> None:
    memory = Slabs(CHUNKS * 100)
    indexes = [Index(memory, size, 1) for size in (7, 11, 50)]
    rng = random.Random(3)
    for step in range(3000):
        index = rng.choice(indexes)
        fill(index, *rng.sample(range(60), rng.randrange(1, 9)))
        if step % 50 == 0:
            spans = sorted(
                (entry.record * size, (entry.record + 1) * size)
                for index, size in zip(indexes, (7, 11, 50), strict=True)
                for entry in index._entries.values()
            )
            assert spans[-1][1] <= memory.nbytes
            assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
    assert all(len(index) for index in indexes)


@pytest.mark.parametrize("seed", range(8))
def test_against_a_slow_model(seed: int) -> None:  # noqa: C901 - one loop of random actions
    """Bytes are versions: whoever reads must see those that were filled under the key, until he lets go."""
    rng, memory = random.Random(seed), slabs()
    index = Index(memory, RECORD, 2)
    content: dict[tuple[int, int], bytes | None] = {}
    filling: list[Reservation] = []
    reading: list[list[Entry]] = []
    for _ in range(1000):
        action = rng.random()
        prompt = keys(*(rng.randrange(4) * 100 + n for n in range(rng.randrange(1, 12))))
        if action < 0.35:
            made = index.reserve(prompt, rng.randrange(2))
            if made is not None:
                filling.append(made)
                for entry in made.entries:
                    content[entry.record, made.rank] = None  # half-written
        elif action < 0.65 and filling:
            made = filling.pop(rng.randrange(len(filling)))
            succeeded = rng.random() < 0.8
            for entry in made.entries:
                content[entry.record, made.rank] = entry.key if succeeded else None
            index.settle(made, filled=succeeded)
        elif action < 0.85:
            hits = index.found(prompt)
            index.touch(hits)
            index.pin(hits)
            reading.append(hits)
        elif reading:
            index.unpin(reading.pop(rng.randrange(len(reading))))
        for hits in reading:
            for entry in hits:
                assert [content[entry.record, rank] for rank in range(2)] == [entry.key] * 2
    for made in filling:
        index.settle(made, filled=False)
    for hits in reading:
        index.unpin(hits)
    assert not index.busy
    assert all(not entry.pins and not entry.filling for entry in index._entries.values())
    assert sum(len(held) for held in index._by_chunk.values()) == len(index)
    assert len(index) + len(index._free) == len(index.chunks) * PER_CHUNK
