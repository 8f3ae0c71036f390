"""Numbers that a request or a peer made too large: refused at once, before they wrap or take memory."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from kvrdma.errors import IncompatibleError, PlanError
from kvrdma.layout import Storage
from kvrdma.plan import BlockSpan, Planner, TokenRange
from kvrdma.plan.cells import MAX_PAGE_ROWS, strided_rows
from kvrdma.plan.finish import check_bounds
from kvrdma.plan.tokens import PageSide, token_map
from kvrdma.topology import RankId
from tests.unit.test_plan import ONE, PAGE, layout, plan, rows


@pytest.mark.parametrize("block", [5, 1 << 40, (1 << 62) + 3, 3 - (1 << 62), (1 << 63) - 1])
def test_block_ids_that_would_wrap_are_refused(block: int) -> None:
    """Four pages to a block: 2**62 + 3 times 4 is 12 in 64 bits, the first page of block 3."""
    whole = layout(pages=20)
    split = msgspec.structs.replace(whole, layers=(msgspec.structs.replace(whole.layers[0], pages_per_block=4),))
    for ids, side in ((([block], [3]), "local"), (([3], [block]), "remote")):
        with pytest.raises(
            PlanError, match=rf"{side} page .*: block id {block} must lie in \[0, 5\), where a block is 4 pages"
        ):
            plan(split, split, ids, (0, 16))
    assert plan(split, split, ([4], [3]), (0, 16)) == [[16 * PAGE, 0, 12 * PAGE, 4 * PAGE]]


@pytest.mark.parametrize("end", [10**9, 10**12, 1 << 62, 10**19])
def test_huge_token_ranges_are_refused_before_memory_is_spent(end: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PlanError, match=r"local page 3 of the sequence|0 <= start <= end <= 1099511627776"):
            plan(layout(), layout(), ([1, 2, 3], [4, 5, 6]), (0, end))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_token_ranges_are_integers() -> None:
    planner = Planner(layout(), {RankId(0, 0): layout()}, ONE)
    for bad in (TokenRange(0, 4.0), TokenRange("0", "4"), (0, 4, 8)):  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="a token range is two integers"):
            planner.plan([BlockSpan([1])], [BlockSpan([1])], bad if isinstance(bad, TokenRange) else [bad])  # type: ignore[list-item]


def test_a_block_of_many_pages_costs_what_is_read() -> None:
    """65,536 pages to a remote block: sixteen blocks are a million pages, of which one is looked up."""
    whole = layout(pages=1 << 20)
    layer = msgspec.structs.replace(whole.layers[0], pages_per_block=1 << 16)
    planner = Planner(layout(), {RankId(0, 0): msgspec.structs.replace(whole, layers=(layer,))}, ONE)
    tracemalloc.start()
    try:
        made = planner.plan([BlockSpan([1])], [BlockSpan(range(16))], TokenRange(0, 4))
        assert made.sources[0].rows.tolist() == [[PAGE, 0, 0, PAGE]]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_bounds_with_one_storage_inside_another() -> None:
    """Rows behind the inner storage still lie in the outer one; storages may also overlap by half."""
    nested = [Storage(100, 400), Storage(200, 16), Storage(450, 150)]
    check_bounds(rows((150, 0, 0, 100), (300, 0, 0, 100), (200, 0, 0, 16), (460, 0, 0, 140)), nested, [Storage(0, 400)])
    for bad in ((90, 0, 0, 20), (300, 0, 0, 301), (599, 0, 0, 2), (600, 0, 0, 1)):
        with pytest.raises(PlanError, match="local region"):
            check_bounds(rows(bad), nested, [Storage(0, 400)])


def test_the_longest_period_is_cheap() -> None:
    """Pages of one token from pages of 65,536: as many local pages to a period, none of which is an object."""
    token_map.cache_clear()
    tracemalloc.start()
    try:
        found = token_map(PageSide(1, 1, 1), 0, PageSide(1 << 16, 1, 1))
        assert (len(found), found.page(7).remote_slot.tolist()) == (1 << 16, [7])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_pages_of_too_many_rows_are_refused() -> None:
    """65,536 tokens of 128 transposed elements are 8 million rows of a byte."""
    with pytest.raises(IncompatibleError, match=f"more than {MAX_PAGE_ROWS}: use the same page format"):
        strided_rows([(1 << 16, 1, 256), (128, 1 << 16, 1)], 1)
