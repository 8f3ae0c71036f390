"""Block patterns, and the check that tells every wrong byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvrdma.bench.memcpy import memcpy_of
from kvrdma.bench.patterns import (
    PATTERNS,
    POISON,
    Bytes,
    Case,
    Shape,
    block_ids,
    describe_word,
    end_words,
    fill,
    find_late,
    find_mismatch,
    rows_of,
    tags,
)
from kvrdma.errors import ConfigError
from kvrdma.rows import merge_rows

SHAPE = Shape(layers=3, blocks=16, block_bytes=64)


def pools(case: Case, generation: int = 7) -> tuple[Bytes, Bytes]:
    """A producer's pool and the consumer's pool after a perfect read, made by the slow, obvious way."""
    remote = np.empty(case.shape.pool_nbytes, np.uint8)
    fill(remote, generation)
    local = np.full(case.shape.pool_nbytes, POISON, np.uint8)
    for addr, _, offset, length in rows_of(case, 0).tolist():
        local[addr : addr + length] = remote[offset : offset + length]
    return remote, local


def test_sizes() -> None:
    assert (SHAPE.rows, SHAPE.nbytes, SHAPE.pool_blocks, SHAPE.pool_nbytes) == (48, 3072, 32, 6144)


def test_contig_is_block_i_to_block_i_and_merges_to_a_row_per_layer() -> None:
    case = Case("contig", SHAPE)
    local, remote = block_ids(case)
    assert local.tolist() == remote.tolist() == list(range(16))
    merged = merge_rows(rows_of(case, 1 << 20)).tolist()
    assert merged == [[(1 << 20) + layer * 2048, 0, layer * 2048, 1024] for layer in range(3)]


def test_fragmented_draws_distinct_blocks_on_each_side_independently() -> None:
    case = Case("fragmented", Shape(1, 1000, 8), seed=3)
    local, remote = block_ids(case)
    for side in (local, remote):
        assert len(set(side.tolist())) == 1000
        assert 0 <= side.min() < 1000 < side.max() < 2000
    assert local.tolist() != remote.tolist()
    assert block_ids(Case("fragmented", case.shape, seed=4))[0].tolist() != local.tolist()
    # A pair of rows is adjacent on both sides by chance only: about one in four million.
    assert len(merge_rows(rows_of(case, 0))) >= 998


def test_remote_contig_is_ascending_there_and_fragmented_here() -> None:
    local, remote = block_ids(Case("remote_contig", Shape(1, 1000, 8)))
    assert remote.tolist() == list(range(1000))
    assert sorted(local.tolist()) != local.tolist()
    assert len(set(local.tolist())) == 1000


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rows_stay_in_their_pools_and_cover_their_bytes_once(pattern: str) -> None:
    rows = rows_of(Case(pattern, SHAPE), 4096, region=5)
    assert rows.dtype == np.uint64
    assert rows.flags.c_contiguous
    assert rows[:, 1].tolist() == [5] * 48
    assert int(rows[:, 3].sum()) == SHAPE.nbytes
    for column, start in ((0, 4096), (2, 0)):
        places = sorted(rows[:, column].tolist())
        assert start <= places[0]
        assert places[-1] + 64 <= start + SHAPE.pool_nbytes
        assert all(b - a >= 64 for a, b in itertools.pairwise(places))


def test_tags_differ_everywhere_and_in_every_generation() -> None:
    words = np.concatenate([tags(generation, 0, 10_000) for generation in (1, 2, 3)])
    assert len(np.unique(words)) == 30_000
    assert tags(2, 100, 5).tolist() == tags(2, 0, 105)[100:].tolist()


def test_a_tag_tells_where_it_was_written() -> None:
    assert "(remote byte 800, generation 9)" in describe_word(int(tags(9, 100, 1)[0]))
    assert "(poison: nothing was written)" in describe_word(0xA5A5A5A5A5A5A5A5)
    assert "(of unknown origin)" in describe_word(0xDEAD)


def test_fill_goes_on_across_chunks() -> None:
    pool = np.zeros((4 << 20) + 64, np.uint8)
    fill(pool, 3)
    assert pool.view(np.uint64)[-1] == tags(3, (4 << 20) // 8 + 7, 1)[0]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_perfect_read_has_no_mismatch(pattern: str) -> None:
    case = Case(pattern, SHAPE)
    assert find_mismatch(pools(case)[1], case, 7) is None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_single_wrong_byte_is_found(pattern: str) -> None:
    case = Case(pattern, Shape(2, 4, 16))
    _, local = pools(case)
    for place in range(len(local)):
        local[place] ^= 1
        found = find_mismatch(local, case, 7)
        assert found is not None
        assert found.local_offset == place // 8 * 8
        local[place] ^= 1


def test_a_stale_generation_is_named() -> None:
    case = Case("fragmented", SHAPE)
    _, stale = pools(case, generation=6)
    found = find_mismatch(stale, case, 7)
    assert found is not None
    row = rows_of(case, 0)[0].tolist()
    assert (found.row, found.local_offset, found.remote_offset) == (0, row[0], row[2])
    assert f"found {describe_word(found.found)}" in str(found)
    assert f"(remote byte {row[2]}, generation 6)" in str(found)


def test_a_shifted_row_is_found_at_its_place() -> None:
    case = Case("fragmented", SHAPE)
    remote, local = pools(case)
    addr, _, offset, length = rows_of(case, 0)[20].tolist()
    local[addr : addr + length] = remote[(offset + 8) % 6000 :][:length]
    found = find_mismatch(local, case, 7)
    assert found is not None
    assert (found.row, found.local_offset, found.remote_offset) == (20, addr, offset)


def test_a_row_that_never_came_is_poison() -> None:
    case = Case("contig", SHAPE)
    _, local = pools(case)
    local[64:128] = POISON
    found = find_mismatch(local, case, 7)
    assert found is not None
    assert found.row == 1
    assert "nothing was written" in str(found)


def test_a_write_outside_every_row_is_found() -> None:
    case = Case("contig", SHAPE)
    _, local = pools(case)
    local[1024] = 0  # the first byte after layer 0's sixteen blocks
    found = find_mismatch(local, case, 7)
    assert found is not None
    assert (found.row, found.local_offset) == (None, 1024)
    assert "memory outside every row is wrong at local byte 1024" in str(found)


@pytest.mark.parametrize("place", [0, 8, (512 << 10) + 9, (1 << 20) - 1])
def test_a_write_beyond_the_case_s_part_of_the_pool_is_found(place: int) -> None:
    case = Case("contig", SHAPE)
    local = np.concatenate([pools(case)[1], np.full(1 << 20, POISON, np.uint8)])
    assert find_mismatch(local, case, 7) is None
    local[SHAPE.pool_nbytes + place] = 0
    found = find_mismatch(local, case, 7)
    assert found is not None
    assert (found.row, found.local_offset) == (None, SHAPE.pool_nbytes + place // 8 * 8)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_ends_of_every_row_are_looked_at_last_rows_first(pattern: str) -> None:
    case = Case(pattern, SHAPE)
    rows = rows_of(case, 0).astype(np.int64)
    for ends, column in zip(end_words(case), (0, 2), strict=True):
        assert ends.tolist() == [word for start in rows[::-1, column] // 8 for word in (start + 7, start)]
    seen = pools(case)[1].view(np.uint64)[end_words(case)[0]]
    assert find_late(seen, case, 7) is None
    seen[[3, 95]] = 0
    found = find_late(seen, case, 7)
    assert found is not None
    assert (found.row, found.local_offset, found.remote_offset) == (46, rows[46, 0], rows[46, 2])
    assert found.expected == tags(7, int(rows[46, 2]) // 8, 1)[0]
    assert "done before all bytes were there: row 46" in str(found)


@pytest.mark.parametrize("shape", [(0, 1, 8), (1, 0, 8), (1, 1, 0), (1, 1, 12)])
def test_impossible_shapes_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        Shape(*shape)


def test_an_unknown_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match="'zigzag' is unknown: use contig"):
        block_ids(Case("zigzag", SHAPE))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_yardstick_copies_the_case_s_blocks(pattern: str) -> None:
    case = Case(pattern, SHAPE)
    source, target = np.empty(SHAPE.pool_nbytes, np.uint8), np.zeros(SHAPE.pool_nbytes, np.uint8)
    fill(source, 1)
    memcpy_of(case, source, target)()
    local, remote = block_ids(case)
    ids = local if pattern == "remote_contig" else remote
    blocks = source.reshape(3, 32, 64)
    assert np.array_equal(target[: SHAPE.nbytes].reshape(3, 16, 64), blocks[:, ids])
    assert not target[SHAPE.nbytes :].any()
