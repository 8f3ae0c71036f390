"""Plans worked out by hand: addresses, merging, counts, and every refusal."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvrdma.errors import IncompatibleError, PlanError
from kvrdma.layout import KVLayout, Layer, Plane, Storage, TokenShare, check_compatible
from kvrdma.page_format import LayerSpec, PageFormat, Part
from kvrdma.plan import BlockSpan, Planner, TokenRange, plan_reads
from kvrdma.plan.finish import check_bounds, join_rows
from kvrdma.topology import EngineShape, RankId, Source, select_sources

ONE = (Source(RankId(0, 0), (0, 2)),)
PAGE = 2 * 4 * 8
"""Bytes of a page of 2 heads, 4 tokens and 8 content bytes."""


def layout(base: int = 0, *, pages: int = 10, layers: int = 1, tokens: int = 4, split: bool = False) -> KVLayout:
    """Head-major pages of 8-byte content; layers in one region, or each in its own right after the other."""
    page = 2 * tokens * 8
    part = Part("kv", 0, 0, tokens * 8, 8, 1, 8, 1)
    fmt = PageFormat("HND", "attention", "uint8", 2, tokens, (part,))
    sizes = [page * pages] * layers if split else [page * pages * layers]
    regions = tuple(Storage(base + i * page * pages, n) for i, n in enumerate(sizes))
    planes = [Plane(i if split else 0, 0 if split else i * page * pages, page, pages) for i in range(layers)]
    made = KVLayout(regions, (fmt,), tuple(Layer(f"l{i}", 0, 0, (0, 2), 2, 1, (p,)) for i, p in enumerate(planes)))
    made.validate()
    return made


def plan(
    local: KVLayout, remote: KVLayout, ids: tuple[list[int], list[int]], tokens: tuple[int, int]
) -> list[list[int]]:
    spans = [[BlockSpan(each)] for each in ids]
    made = plan_reads(local, {RankId(0, 0): remote}, ONE, spans[0], spans[1], TokenRange(*tokens))
    rows = made.sources[0].rows
    assert rows.dtype == np.uint64
    assert rows.flags.c_contiguous
    assert rows.shape[1:] == (4,)
    return sorted([int(n) for n in row] for row in rows)


def test_scattered_blocks_are_a_row_each_and_neighbours_one() -> None:
    assert plan(layout(1 << 20), layout(), ([7, 2], [3, 8]), (0, 8)) == [
        [(1 << 20) + 2 * PAGE, 0, 8 * PAGE, PAGE],
        [(1 << 20) + 7 * PAGE, 0, 3 * PAGE, PAGE],
    ]
    assert plan(layout(1 << 20), layout(), ([2, 3, 4], [6, 7, 8]), (0, 12)) == [
        [(1 << 20) + 2 * PAGE, 0, 6 * PAGE, 3 * PAGE]
    ]
    assert len(plan(layout(), layout(), ([2, 3], [7, 6]), (0, 8))) == 2


def test_descending_ids_merge_too() -> None:
    assert plan(layout(), layout(), ([4, 3, 2], [8, 7, 6]), (0, 12)) == [[2 * PAGE, 0, 6 * PAGE, 3 * PAGE]]


def test_contiguous_blocks_are_one_row_per_region_and_regions_stay_apart() -> None:
    """Ten pages fill a region; the next region starts at the next address, and no row crosses over."""
    ids = list(range(10))
    for there in (layout(layers=3), layout(layers=3, split=True)):
        rows = plan(layout(1 << 20, layers=3, split=True), there, (ids, ids), (0, 40))
        assert [(row[0], row[3]) for row in rows] == [((1 << 20) + i * 10 * PAGE, 10 * PAGE) for i in range(3)]
    assert plan(layout(1 << 20, layers=3), layout(layers=3), (ids, ids), (0, 40)) == [[1 << 20, 0, 0, 30 * PAGE]]


def test_partial_last_block_and_lookahead() -> None:
    """6 tokens of blocks of 4: block 1 whole, then 2 tokens of each head; further ids are not touched."""
    rows = plan(layout(), layout(), ([1, 5, 9], [2, 7, 8, 3]), (0, 6))
    assert rows == [
        [PAGE, 0, 2 * PAGE, PAGE],
        [5 * PAGE, 0, 7 * PAGE, 16],
        [5 * PAGE + 32, 0, 7 * PAGE + 32, 16],
    ]


def test_cached_prefix_inside_a_block() -> None:
    rows = plan(layout(), layout(), ([1, 5], [2, 7]), (3, 8))
    assert rows == [
        [PAGE + 24, 0, 2 * PAGE + 24, 8],
        [PAGE + 56, 0, 2 * PAGE + 56, 8],
        [5 * PAGE, 0, 7 * PAGE, PAGE],
    ]


def test_block_sizes_without_a_common_factor() -> None:
    """Blocks of 4 from blocks of 3: tokens 4..7 are in remote blocks 1 (slots 1, 2) and 2 (slots 0, 1)."""
    rows = plan(layout(), layout(tokens=3), ([0, 1], [0, 2, 4]), (4, 8))
    remote = 2 * 3 * 8
    assert rows == [
        [PAGE, 0, 2 * remote + 8, 16],
        [PAGE + 16, 0, 4 * remote, 16],
        [PAGE + 32, 0, 2 * remote + 32, 16],
        [PAGE + 48, 0, 4 * remote + 24, 16],
    ]


def test_dropped_leading_blocks() -> None:
    """A window needs tokens 8..11 only: local ids start at block 2 of the sequence, remote ids at block 1."""
    planner = Planner(layout(), {RankId(0, 0): layout()}, ONE)
    window = TokenRange(0, 12).last(4)
    assert window == (8, 12)
    made = planner.plan([BlockSpan([3], 2)], [BlockSpan.without_null([0, 5, 6])], window)
    assert made.sources[0].rows.tolist() == [[3 * PAGE, 0, 6 * PAGE, PAGE]]
    assert BlockSpan.without_null([0, 0, 5, 6]) == BlockSpan([5, 6], 2)
    assert BlockSpan.without_null([0, 0]) == BlockSpan([], 2)
    with pytest.raises(PlanError, match=r"local page 1 of the sequence, but the blocks cover pages 2 to 2"):
        planner.plan([BlockSpan([3], 2)], [BlockSpan([4, 5, 6])], TokenRange(4, 12))


@pytest.mark.parametrize("tokens", [(0, 0), (8, 8), (5, 5)])
def test_nothing_to_read_still_names_every_source(tokens: tuple[int, int]) -> None:
    sources = select_sources(EngineShape(1, 2), RankId(0, 0), EngineShape(1, 2))
    made = plan_reads(
        layout(), {RankId(0, 0): layout()}, sources, [BlockSpan([])], [BlockSpan([1])], TokenRange(*tokens)
    )
    assert [s.source for s in made.sources] == list(sources)
    assert made.sources[0].rows.shape == (0, 4)
    assert (made.nbytes, made.reshapes, made.sources[0].rows_before) == (0, (), 0)


def test_empty_token_share_is_a_source_without_rows() -> None:
    """Two tokens with interleave 2 are all on dcp rank 0; rank 1 is still told."""
    remote = EngineShape(2, 2, 2, 2)
    sources = select_sources(EngineShape(1, 2), RankId(0, 0), remote)
    there = {s.rank: msgspec.structs.replace(layout(), dcp_rank=s.rank.rank, dcp_size=2, interleave=2) for s in sources}
    made = plan_reads(layout(), there, sources, [BlockSpan([1])], [BlockSpan([4])], TokenRange(0, 2))
    assert [(s.source.rank.rank, s.nbytes) for s in made.sources] == [(0, 32), (1, 0)]


@pytest.mark.parametrize(
    ("ids", "tokens", "why"),
    [
        (([1], [2]), (0, 5), "local page 1 of the sequence"),
        (([1, 3], [2]), (0, 5), "remote page 1 of the sequence, but the blocks cover pages 0 to 0"),
        (([1, 10], [2, 3]), (0, 8), r"local page 10 is outside its tensor: block id 10 must lie in \[0, 10\)"),
        (([1, 2], [2, -1]), (0, 8), r"remote page -1 is outside its tensor: block id -1 must lie in \[0, 10\)"),
        (([4, 4], [2, 3]), (0, 8), "local page 4 appears twice"),
        (([3, 4], [0, 0]), (0, 8), "remote page 0 appears twice"),
        (([1], [2]), (3, 2), "0 <= start <= end"),
        (([1], [2]), (-1, 2), "0 <= start <= end"),
    ],
)
def test_ids_that_do_not_fit(ids: tuple[list[int], list[int]], tokens: tuple[int, int], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        plan(layout(layers=2), layout(layers=2), ids, tokens)


def test_absurd_numbers_of_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of three scattered blocks are six rows."""
    args = layout(layers=2), layout(layers=2), ([1, 3, 5], [1, 4, 7]), (0, 12)
    monkeypatch.setattr("kvrdma.plan.planner.MAX_ROWS", 6)
    assert len(plan(*args)) == 6
    monkeypatch.setattr("kvrdma.plan.planner.MAX_ROWS", 5)
    with pytest.raises(PlanError, match=r"over 5 rows \(6 for 3 pages of l0\)"):
        plan(*args)


@pytest.mark.parametrize(
    ("span", "why"),
    [
        (BlockSpan([1.0]), "dtype float64"),  # type: ignore[list-item]
        (BlockSpan([[1]]), r"shape \(1, 1\)"),  # type: ignore[list-item]
        (BlockSpan([1], -1), "first -1"),
        (BlockSpan([[1], [1, 2]]), "flat list of integers"),  # type: ignore[list-item]
        (BlockSpan([1], 1 << 62), "first 4611686018427387904"),
        (BlockSpan([1], 1.5), "first an integer, got first 1.5"),  # type: ignore[arg-type]
        (BlockSpan([1, 2**65]), "dtype object"),
        (BlockSpan(np.array([2**64 - 1], np.uint64)), "block 18446744073709551615 is outside"),
    ],
)
def test_malformed_spans(span: BlockSpan, why: str) -> None:
    planner = Planner(layout(), {RankId(0, 0): layout()}, ONE)
    for spans in ((span, BlockSpan([1])), (BlockSpan([1]), span)):
        with pytest.raises(PlanError, match=why):
            planner.plan([spans[0]], [spans[1]], TokenRange(0, 1))


def test_repeated_remote_block_outside_the_range_is_harmless() -> None:
    assert plan(layout(), layout(), ([1, 2], [0, 5, 0]), (4, 8)) == [[2 * PAGE, 0, 5 * PAGE, PAGE]]


def test_groups_have_their_own_blocks_and_ranges() -> None:
    def grouped(base: int) -> KVLayout:
        made = layout(base, layers=2)
        second = msgspec.structs.replace(made.layers[1], group=1)
        return msgspec.structs.replace(made, layers=(made.layers[0], second))

    planner = Planner(grouped(0), {RankId(0, 0): grouped(0)}, ONE)
    made = planner.plan(
        [BlockSpan([1, 2]), BlockSpan([4], 1)],
        [BlockSpan([3, 4]), BlockSpan([9], 1)],
        [TokenRange(0, 8), TokenRange(4, 8)],
    )
    start = 10 * PAGE
    assert made.sources[0].rows.tolist() == [
        [PAGE, 0, 3 * PAGE, 2 * PAGE],
        [start + 4 * PAGE, 0, start + 9 * PAGE, PAGE],
    ]
    with pytest.raises(PlanError, match="layer l1 uses KV group 1: got 1 local and 2 remote"):
        planner.plan([BlockSpan([1])], [BlockSpan([1]), BlockSpan([1])], TokenRange(0, 4))
    with pytest.raises(PlanError, match="KV group 1 has no token range; got 1"):
        planner.plan([BlockSpan([1])] * 2, [BlockSpan([1])] * 2, [TokenRange(0, 4)])


def test_state_moves_whole_blocks_whatever_the_tokens() -> None:
    spec = LayerSpec((0, 1), 1, 1, "state")
    here, there = (KVLayout.from_tensors({"s": np.zeros((6, 999), np.int8)}, spec) for _ in range(2))
    planner = Planner(here, {RankId(0, 0): there}, ONE)
    made = planner.plan([BlockSpan([4], 3)], [BlockSpan([2])], TokenRange(17, 20))
    assert made.sources[0].rows.tolist() == [[here.regions[0].addr + 4 * 999, 0, 2 * 999, 999]]
    with pytest.raises(PlanError, match="2 local and 1 remote state blocks"):
        planner.plan([BlockSpan([4, 5])], [BlockSpan([2])], TokenRange(0, 1))


def test_kernel_blocks_are_named_by_their_block_id() -> None:
    """Block ids of 8 tokens over pages of 4: id 3 is pages 6 and 7."""
    here = layout()
    split = msgspec.structs.replace(here, layers=(msgspec.structs.replace(here.layers[0], pages_per_block=2),))
    assert plan(split, layout(), ([3], [1, 5]), (0, 8)) == [
        [6 * PAGE, 0, PAGE, PAGE],
        [7 * PAGE, 0, 5 * PAGE, PAGE],
    ]


def rows(*values: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(values, np.uint64)


def test_bounds_catch_each_end() -> None:
    local, remote = [Storage(100, 50), Storage(500, 10)], [Storage(0, 40)]
    check_bounds(rows((100, 0, 0, 40), (500, 0, 30, 10)), local, remote)
    for bad, why in (
        ((99, 0, 0, 1), "local region"),
        ((149, 0, 0, 2), "local region"),
        ((300, 0, 0, 1), "local region"),
        ((500, 0, 0, 11), "local region"),
        ((100, 0, 40, 1), "remote region"),
        ((100, 0, 0, 41), "remote region"),
        ((100, 0, 2**64 - 1, 2), "remote region"),
        ((2**64 - 1, 0, 0, 2), "local region"),
        ((100, 1, 0, 1), "only 1 regions"),
    ):
        with pytest.raises(PlanError, match=rf"row 1 .*{why}"):
            check_bounds(rows((100, 0, 0, 1), bad), local, remote)
    with pytest.raises(PlanError, match=r"row 0 .*local region"):
        check_bounds(rows((99, 0, 0, 1)), local[:1], remote)


def test_a_layout_that_lies_is_caught_by_the_bounds() -> None:
    """The region shrank after the planner was made of it: no row may leave what is left."""
    small = msgspec.structs.replace(layout(), regions=(Storage(0, 5 * PAGE),))
    with pytest.raises(PlanError, match="remote region"):
        plan(layout(), small, ([1], [5]), (0, 4))


def test_join_keeps_other_regions_and_gaps_apart() -> None:
    pieces = rows((0, 0, 0, 8), (8, 1, 8, 8), (16, 1, 16, 8), (24, 1, 25, 8), (33, 1, 33, 8))
    assert join_rows(pieces[::-1], [Storage(0, 100)]).tolist() == [
        [0, 0, 0, 8], [8, 1, 8, 16], [24, 1, 25, 8], [33, 1, 33, 8],
    ]  # fmt: skip


def spec_layout(spec: LayerSpec, shape: tuple[int, ...], dtype: str = "uint16", name: str = "a") -> KVLayout:
    return KVLayout.from_tensors({name: np.zeros(shape, dtype)}, spec)


BASE = LayerSpec((0, 2), 2, 4)


@pytest.mark.parametrize(
    ("remote", "why"),
    [
        (spec_layout(BASE, (5, 2, 4, 8), "uint8"), "layer a: dtype differ: local uint16 .*remote uint8"),
        (
            spec_layout(BASE, (5, 2, 4, 10)),
            r"parts differ: local \{'k': 8, 'v': 8\} \(HND\), remote \{'k': 10, 'v': 10\}",
        ),
        (
            spec_layout(LayerSpec((0, 2), 4, 4), (5, 2, 4, 8)),
            "kv heads of the model differ: local 2 .*remote 4",
        ),
        (spec_layout(LayerSpec((0, 2), 2, 4, group=1), (5, 2, 4, 8)), "group differ: local 0 .*remote 1"),
        (spec_layout(LayerSpec((0, 2), 2, 4, kv_split=False), (5, 2, 4, 8)), "parts differ"),
        (
            spec_layout(LayerSpec((0, 1), 1, 4, "mla"), (5, 4, 8)),
            "content differ: local keys and values .*remote latent",
        ),
        (spec_layout(LayerSpec((0, 1), 1, 1, "state"), (5, 64)), "content differ: .*remote state"),
    ],
)
def test_pairs_that_no_plan_can_serve_are_refused(remote: KVLayout, why: str) -> None:
    local = spec_layout(BASE, (5, 2, 4, 8))
    with pytest.raises(IncompatibleError, match=why):
        check_compatible(local, remote)
    with pytest.raises(IncompatibleError, match=why):
        Planner(local, {RankId(0, 0): remote}, ONE)


def test_state_shares_and_sizes_must_agree() -> None:
    local = spec_layout(LayerSpec((0, 1), 2, 1, "state"), (5, 64))
    with pytest.raises(IncompatibleError, match="state shares differ"):
        check_compatible(local, spec_layout(LayerSpec((1, 2), 2, 1, "state"), (5, 64)))
    with pytest.raises(IncompatibleError, match=r"parts differ: local \{'state': 128\}.*\{'state': 64\}"):
        check_compatible(local, spec_layout(LayerSpec((0, 1), 2, 1, "state"), (5, 32)))


def test_transposed_keys_need_equal_elements() -> None:
    cpu = LayerSpec((0, 2), 2, 4, "cpu", dtype="x")
    local = spec_layout(cpu, (5, 2, 4, 8))
    with pytest.raises(IncompatibleError, match=r"element bytes differ: local \[2\] .*remote \[1\]"):
        check_compatible(local, spec_layout(cpu, (5, 2, 4, 16), "uint8"))
    check_compatible(local, spec_layout(replace(cpu, kind="attention"), (5, 2, 4, 16), "uint8"))


def test_a_layer_or_head_nobody_holds_is_refused_when_prepared() -> None:
    local = spec_layout(BASE, (5, 2, 4, 8))
    with pytest.raises(IncompatibleError, match="layer a: no source holds"):
        Planner(local, {RankId(0, 0): spec_layout(BASE, (5, 2, 4, 8), name="b")}, ONE)
    half = spec_layout(LayerSpec((0, 1), 2, 4), (5, 1, 4, 8))
    with pytest.raises(IncompatibleError, match=r"layer a: no source holds \(head, dcp rank\) \[\(1, 0\)\]"):
        Planner(local, {RankId(0, 0): half}, ONE)
    sharded = KVLayout.from_tensors({"a": np.zeros((5, 2, 4, 8), np.uint16)}, BASE, TokenShare(0, 2, 1))
    with pytest.raises(IncompatibleError, match=r"\[\(0, 1\), \(1, 1\)\]"):
        Planner(local, {RankId(0, 0): sharded}, ONE)
    with pytest.raises(PlanError, match="has no layout"):
        Planner(local, {}, ONE)


def test_remote_ranks_must_agree_on_blocks() -> None:
    local = spec_layout(BASE, (5, 2, 4, 8))
    ranks = {
        RankId(0, 0): spec_layout(LayerSpec((0, 1), 2, 4), (5, 1, 4, 8)),
        RankId(0, 1): spec_layout(LayerSpec((1, 2), 2, 8), (5, 1, 8, 8)),
    }
    both = (Source(RankId(0, 0), (0, 1)), Source(RankId(0, 1), (1, 2)))
    with pytest.raises(IncompatibleError, match="remote ranks differ in block or dcp sizes"):
        Planner(local, ranks, both)


def test_blocks_that_never_line_up_are_refused() -> None:
    sizes = [spec_layout(LayerSpec((0, 2), 2, n), (2, 2, n, 8)) for n in (1999, 2003)]
    with pytest.raises(IncompatibleError, match="line up only every 4003997 tokens"):
        Planner(sizes[0], {RankId(0, 0): sizes[1]}, ONE)


def test_layers_with_different_heads_take_each_head_once() -> None:
    """An MLA layer of 4 tokens x 8 bytes and a draft layer of 4 heads: two ranks hold the latent and 2 heads each."""
    mla = LayerSpec((0, 1), 1, 4, "mla")

    def rank(lo: int, hi: int) -> KVLayout:
        tensors = {"a": np.zeros((5, 4, 4), np.uint16), "draft": np.zeros((5, hi - lo, 4, 8), np.uint16)}
        return KVLayout.from_tensors(tensors, {"a": mla, "draft": LayerSpec((lo, hi), 4, 4, dims="BHNC")})

    sources = select_sources(EngineShape(1, 4), RankId(0, 0), EngineShape(2, 4))
    remote = {RankId(0, r): rank(2 * r, 2 * r + 2) for r in range(2)}
    made = plan_reads(rank(0, 4), remote, sources, [BlockSpan([1])], [BlockSpan([2])], TokenRange(0, 4))
    assert [s.nbytes for s in made.sources] == [32 + 2 * 4 * 16, 2 * 4 * 16]


def test_replicated_heads_are_read_once() -> None:
    """Both ranks hold both heads; the second source adds nothing but is still listed."""
    both = (Source(RankId(0, 0), (0, 2)), Source(RankId(0, 1), (0, 2)))
    there = {RankId(0, r): layout() for r in range(2)}
    made = plan_reads(layout(), there, both, [BlockSpan([1])], [BlockSpan([2])], TokenRange(0, 4))
    assert [s.nbytes for s in made.sources] == [PAGE, 0]
