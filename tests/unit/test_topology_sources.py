"""Source selection for any pair of engines, against known answers and a brute-force owner table."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from kvrdma.errors import TopologyError
from kvrdma.token_shares import dcp_overlap
from kvrdma.topology import EngineShape, RankId, Source, consumers_of, select_sources


def sources(local: EngineShape, rank: int, remote: EngineShape, pp: int = 0) -> list[int]:
    return [source.rank.rank for source in select_sources(local, RankId(pp, rank), remote)]


@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize(
    ("producer", "consumer", "expected"),
    [
        ((2, 4), (4, 2), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ((2, 2), (8, 4), [[0], [1], [0], [1], [2], [3], [2], [3]]),
        ((1, 4), (4, 2), [[0, 2], [1, 3], [0, 2], [1, 3]]),
    ],
)
def test_known_answers_gqa_under_dcp(
    heads: int, producer: tuple[int, int], consumer: tuple[int, int], expected: list[list[int]]
) -> None:
    """The producer's ranks are tp x dcp; the consumer splits its tp ranks, as vLLM does."""
    p = EngineShape(producer[0], heads, producer[1], dcp_across_tp=True)
    d = EngineShape(consumer[0], heads, consumer[1])
    assert d.num_ranks == len(expected)
    assert [sources(d, rank, p) for rank in range(d.num_ranks)] == expected


def test_known_answers_replicated_heads() -> None:
    assert select_sources(EngineShape(1, 2), RankId(0, 0), EngineShape(4, 2)) == (
        Source(RankId(0, 0), (0, 1)),
        Source(RankId(0, 2), (1, 2)),
    )
    p, d = EngineShape(8, 8), EngineShape(16, 8)
    assert [select_sources(d, RankId(0, r), p) for r in range(16)] == [
        (Source(RankId(0, r // 2), (r // 2, r // 2 + 1)),) for r in range(16)
    ]


def test_gqa_under_dcp_holds_what_vllm_puts_there() -> None:
    """vLLM allows dcp up to tp / heads: rank r holds head r * heads // tp and token share r % dcp."""
    checked = 0
    for heads, tp, dcp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if tp % heads == 0 and dcp <= tp // heads:
            shape = EngineShape(tp, heads, dcp)
            for rank in range(tp):
                assert shape.heads(rank) == (rank * heads // tp, rank * heads // tp + 1)
                assert shape.dcp_rank(rank) == rank % dcp
                checked += 1
    assert checked > 200


def test_tp_ratios_that_do_not_divide() -> None:
    p, d = EngineShape(6, 12), EngineShape(4, 12)
    assert [[(s.rank.rank, s.heads) for s in select_sources(d, RankId(0, r), p)] for r in range(4)] == [
        [(0, (0, 2)), (1, (2, 3))],
        [(1, (3, 4)), (2, (4, 6))],
        [(3, (6, 8)), (4, (8, 9))],
        [(4, (9, 10)), (5, (10, 12))],
    ]


def test_mla_reads_one_replica_and_spreads_the_readers() -> None:
    p = EngineShape(8, 128, is_mla=True)
    assert [sources(EngineShape(4, 128, is_mla=True), r, p) for r in range(4)] == [[0], [2], [4], [6]]
    assert [sources(EngineShape(4, 128, 4, is_mla=True), r, p) for r in range(4)] == [[0], [2], [4], [6]]
    two = EngineShape(2, 128, is_mla=True)
    assert [sources(EngineShape(4, 128, 4, is_mla=True), r, two) for r in range(4)] == [[0], [0], [1], [1]]


def test_stages_are_matched_by_layer_name() -> None:
    p = EngineShape(1, 8, stages=(("a", "b"), ("c",), ("d", "e")))
    d = EngineShape(1, 8, stages=(("e", "d", "c"), ("b", "a")))
    assert [[s.rank for s in select_sources(d, RankId(pp, 0), p)] for pp in range(2)] == [
        [RankId(1, 0), RankId(2, 0)],
        [RankId(0, 0)],
    ]
    assert consumers_of(p, RankId(1, 0), d) == {RankId(0, 0)}
    assert consumers_of(p, RankId(0, 0), d) == {RankId(1, 0)}
    whole = EngineShape(1, 8)
    assert [s.rank.pp_rank for s in select_sources(whole, RankId(0, 0), p)] == [0, 1, 2]


def test_consumers_are_named_and_unread_replicas_have_none() -> None:
    p, d = EngineShape(4, 2), EngineShape(1, 2)
    assert [consumers_of(p, RankId(0, r), d) for r in range(4)] == [
        {RankId(0, 0)},
        set(),
        {RankId(0, 0)},
        set(),
    ]
    wide = EngineShape(8, 2)
    assert consumers_of(EngineShape(2, 2), RankId(0, 1), wide) == {RankId(0, r) for r in (4, 5, 6, 7)}


def owned(shape: EngineShape, rank: int, period: int) -> set[tuple[int, int]]:
    """(head, position) a rank holds, spelled out."""
    part, dcp_rank = rank // shape.dcp_size, rank % shape.dcp_size
    heads = [h for h in range(shape.total_heads) if part in _parts_of(shape, h)]
    positions = [p for p in range(period) if (p // shape.interleave) % shape.dcp_size == dcp_rank]
    return set(itertools.product(heads, positions))


def _parts_of(shape: EngineShape, head: int) -> list[int]:
    table = []
    for part in range(shape.parts):
        if shape.parts >= shape.total_heads:
            mine = [part // (shape.parts // shape.total_heads)]
        else:
            each = shape.total_heads // shape.parts
            mine = list(range(part * each, (part + 1) * each))
        if head in mine:
            table.append(part)
    return table


def shapes(heads: int, *, mla: bool) -> list[EngineShape]:
    total = 1 if mla else heads
    found = []
    for parts, dcp, interleave in itertools.product((1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 3, 4, 8), (1, 4)):
        if parts % total == 0 or total % parts == 0:
            found.append(EngineShape(parts * dcp, heads, dcp, interleave, mla))
    return found


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 12])
def test_brute_force_owner_table(heads: int, mla: bool) -> None:
    """Every rank reads each (head, position) it owns once, from ranks that own it, and none in vain."""
    checked = 0
    every = shapes(heads, mla=mla)
    for local, remote in itertools.product(every, every[:: 1 if len(every) < 30 else 3]):
        period = math.lcm(local.dcp_size * local.interleave, remote.dcp_size * remote.interleave)
        for rank in {0, 1 % local.num_ranks, local.num_ranks // 2, local.num_ranks - 1}:
            want = owned(local, rank, period)
            got: list[tuple[int, int]] = []
            for source in select_sources(local, RankId(0, rank), remote):
                there = owned(remote, source.rank.rank, period)
                lo, hi = source.heads
                share = {cell for cell in there if lo <= cell[0] < hi} & want
                assert share, (local, rank, remote, source)
                got.extend(share)
            assert len(got) == len(set(got)), (local, rank, remote)
            assert set(got) == want, (local, rank, remote)
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("heads", [2, 8])
def test_consumers_invert_sources(heads: int) -> None:
    for p, d in itertools.product(shapes(heads, mla=False)[::5], repeat=2):
        pairs = {(s.rank, r) for r in d.all_ranks() for s in select_sources(d, r, p)}
        assert pairs == {(r, reader) for r in p.all_ranks() for reader in consumers_of(p, r, d)}


def test_shapes_that_cannot_be() -> None:
    with pytest.raises(TopologyError, match="dcp size 3 does not divide tp size 4"):
        EngineShape(4, 8, 3)
    with pytest.raises(TopologyError, match="6 kv heads, 4 parts"):
        EngineShape(4, 6)
    with pytest.raises(TopologyError, match="at least 1"):
        EngineShape(1, 8, interleave=0)
    with pytest.raises(TopologyError, match="local engine has 8 kv heads, remote 4"):
        select_sources(EngineShape(1, 8), RankId(0, 0), EngineShape(1, 4))
    with pytest.raises(TopologyError, match="rank 2 is outside the 2 ranks"):
        select_sources(EngineShape(2, 8), RankId(0, 2), EngineShape(1, 8))


@pytest.mark.parametrize("seed", range(40))
def test_overlap_of_token_shares_equals_a_count_of_positions(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 9), rng.randint(1, 24)) for _ in range(2)]
    (mine, mine_at), (theirs, theirs_at) = sizes
    positions = np.arange(math.lcm(mine * mine_at, theirs * theirs_at))
    for rank in range(mine):
        held = positions[positions // mine_at % mine == rank]
        want = tuple(np.unique(held // theirs_at % theirs).tolist())
        assert dcp_overlap((rank, mine, mine_at), theirs, theirs_at) == want, sizes


def test_interleaves_without_a_common_factor_cost_nothing() -> None:
    """Two dcp ranks each, rounds of 2 * 99991 and 2 * 99989 positions: they meet in every pair of ranks."""
    local, remote = (EngineShape(2, 2, 2, interleave) for interleave in (99991, 99989))
    assert [source.rank.rank for source in select_sources(local, RankId(0, 0), remote)] == [0, 1]


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"num_kv_heads": 1 << 20}, "num_kv_heads must be at least 1 and at most 65536, got 1048576"),
        ({"tp_size": 1 << 22}, "tp_size must .* at most 4096, got 4194304"),
        ({"interleave": 1 << 31}, "interleave must .* at most 1048576"),
        ({"tp_size": 4096, "dcp_size": 2, "dcp_across_tp": True}, "1 stages of 8192 ranks .*more than the 4096"),
        ({"tp_size": 64, "stages": (("a",),) * 65}, "65 stages of 64 ranks"),
    ],
)
def test_sizes_above_any_engine_are_refused(sizes: dict[str, Any], why: str) -> None:
    with pytest.raises(TopologyError, match=why):
        EngineShape(**{"tp_size": 1, "num_kv_heads": 1, **sizes})


def test_every_rank_of_a_large_engine_names_its_consumers_quickly() -> None:
    """4096 ranks asked one after the other, as an engine does for those that nobody reads: one pass, not one each."""
    producer, consumer = EngineShape(4096, 1), EngineShape(64, 1)
    readers = [consumers_of(producer, rank, consumer) for rank in producer.all_ranks()]
    assert sum(map(len, readers)) == 64
    assert readers[0] == {RankId(0, 0)}
    assert not readers[1]
