"""Plans whose rows need no second look, and those that do."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from kvrdma.errors import PlanError
from kvrdma.layout import KVLayout, Plane
from kvrdma.page_format import LayerSpec
from kvrdma.plan import BlockSpan, Planner, ReadPlan, TokenRange, planner
from kvrdma.topology import RankId
from tests.unit.test_plan import ONE, PAGE, layout

Ids = tuple[list[int], list[int]]


@pytest.fixture(params=["short", "by NumPy"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "short":
        monkeypatch.setattr(planner, "short_pieces", lambda *_: None)


def made(local: KVLayout, remote: KVLayout, ids: Ids, tokens: tuple[int, int]) -> ReadPlan:
    spans = [[BlockSpan(tuple(each))] for each in ids]
    return Planner(local, {RankId(0, 0): remote}, ONE).plan(spans[0], spans[1], TokenRange(*tokens))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the functions that look at every row are called."""
    called: list[str] = []
    for name in ("join_rows", "check_bounds"):
        real: Callable[..., object] = getattr(planner, name)

        def note(*given: object, name: str = name, real: Callable[..., object] = real) -> object:
            called.append(name)
            return real(*given)

        monkeypatch.setattr(planner, name, note)
    return called


def two_planes(blocks: int) -> KVLayout:
    """Keys of all blocks, then values."""
    return KVLayout.from_tensors({"a": np.zeros((2, blocks, 4, 2, 8), np.uint8)}, LayerSpec((0, 2), 2, 4, dims="2BNHC"))


SCATTERED: Ids = ([8, 2, 5], [1, 6, 3])


@pytest.mark.parametrize(
    ("local", "remote", "ids", "tokens"),
    [
        (layout(layers=3), layout(layers=3), SCATTERED, (0, 12)),
        (layout(layers=3), layout(layers=3), SCATTERED, (0, 11)),  # the last page in part
        (layout(layers=3), layout(layers=3), SCATTERED, (1, 11)),  # the first, too
        (layout(layers=3, split=True), layout(layers=3), SCATTERED, (0, 12)),
        (layout(), layout(), ([4, 5, 6], [9, 7, 5]), (0, 12)),  # next to each other on this side only
        (layout(), layout(), ([4, 6, 8], [5, 6, 7]), (0, 12)),  # or on the other
        (layout(), layout(), ([4, 5, 7], [2, 3, 9]), (0, 12)),  # joined page by page
        (two_planes(12), two_planes(12), SCATTERED, (0, 12)),
        (two_planes(12), two_planes(12), SCATTERED, (0, 10)),
    ],
)
def test_scattered_pages_need_no_second_look(
    looks: list[str], local: KVLayout, remote: KVLayout, ids: Ids, tokens: tuple[int, int]
) -> None:
    made(local, remote, ids, tokens)
    assert looks == []


@pytest.mark.parametrize(
    ("ids", "tokens", "rows", "before"),
    [
        ((list(range(10)), list(range(10))), (0, 40), 1, 20),  # one layer ends where the next one begins
        (([2, 3, 4], [6, 7, 8]), (0, 10), 4, 8),  # two pages and the first head of the third, the second head apart
        (([3, 2], [7, 6]), (0, 6), 6, 6),
    ],
)
def test_rows_that_may_meet_are_looked_at(
    looks: list[str], ids: Ids, tokens: tuple[int, int], rows: int, before: int
) -> None:
    (source,) = made(layout(layers=2), layout(layers=2), ids, tokens).sources
    assert (len(source.rows), source.rows_before) == (rows, before)
    assert looks == ["join_rows"]


def test_pages_joined_before_their_rows_exist_keep_their_bytes(looks: list[str]) -> None:
    (source,) = made(layout(layers=2), layout(layers=2), ([7, 5, 4, 2], [9, 3, 2, 4]), (0, 16)).sources
    assert source.rows.tolist() == [
        [start + page * PAGE, 0, start + theirs * PAGE, pages * PAGE]
        for start in (0, 10 * PAGE)
        for page, theirs, pages in ((2, 4, 1), (4, 2, 2), (7, 9, 1))
    ]
    assert (source.rows_before, source.nbytes, looks) == (8, 8 * PAGE, [])


@pytest.mark.parametrize(
    ("theirs", "rows"),
    [
        ([0, 5, 9], 5),  # their last page of a layer touches the first of the next, as here: one row less
        ([9, 5, 0], 6),
        ([1, 5, 9], 6),
    ],
)
def test_layers_that_touch_here_are_looked_at_only_where_they_do_on_the_other_side(
    looks: list[str], theirs: list[int], rows: int
) -> None:
    (source,) = made(layout(layers=2), layout(layers=2), ([0, 4, 9], theirs), (0, 12)).sources
    assert (len(source.rows), source.rows_before) == (rows, 6)
    assert looks == (["join_rows"] if rows == 5 else [])


def test_layers_that_lie_in_one_another_are_looked_at(looks: list[str]) -> None:
    """Blocks that hold a page of each layer: the pages of one block follow each other on both sides."""
    layers = [Plane(0, i * PAGE, 3 * PAGE, 10) for i in range(3)]
    whole = layout(layers=3, pages=10)
    woven = KVLayout(
        whole.regions,
        whole.formats,
        tuple(
            type(layer)(layer.name, 0, 0, layer.heads, 2, 1, (plane,))
            for layer, plane in zip(whole.layers, layers, strict=True)
        ),
    )
    woven.validate()
    (source,) = made(woven, woven, ([7, 2], [3, 8]), (0, 8)).sources
    assert sorted(source.rows.tolist()) == [[6 * PAGE, 0, 24 * PAGE, 3 * PAGE], [21 * PAGE, 0, 9 * PAGE, 3 * PAGE]]
    assert looks == ["join_rows"]


@pytest.mark.parametrize(
    ("lie", "where"),
    [({"page_stride": -32}, "local"), ({"page_stride": -32}, "remote"), ({"region": -1}, "remote")],
)
def test_a_layout_that_lies_is_looked_at_row_by_row(looks: list[str], lie: dict[str, int], where: str) -> None:
    """None comes out of a handshake; whoever makes a plan of one himself is told."""
    honest = layout()
    (layer,) = honest.layers
    plane = msgspec.structs.replace(layer.planes[0], **lie)
    false = msgspec.structs.replace(honest, layers=(msgspec.structs.replace(layer, planes=(plane,)),))
    with pytest.raises(PlanError, match=rf"{where} region|the peer has only"):
        made(*((false, honest) if where == "local" else (honest, false)), ([3], [3]), (0, 4))
    assert "check_bounds" in looks


@pytest.mark.parametrize("lie", [{"page_stride": 1 << 58}, {"page_stride": -(1 << 58)}, {"offset": 1 << 61}])
def test_a_layout_of_more_than_any_memory_is_refused(lie: dict[str, int]) -> None:
    honest = layout()
    (layer,) = honest.layers
    false = msgspec.structs.replace(
        honest, layers=(msgspec.structs.replace(layer, planes=(msgspec.structs.replace(layer.planes[0], **lie),)),)
    )
    for pair in ((false, honest), (honest, false)):
        with pytest.raises(PlanError, match=r"layer l0: 10 pages, .* are more than any memory"):
            Planner(pair[0], {RankId(0, 0): pair[1]}, ONE)


def test_pages_that_lie_among_one_another_meet_at_any_distance(looks: list[str]) -> None:
    """Tokens first, then blocks: token t of the last page is followed by token t + 1 of the first."""
    spec = LayerSpec((0, 1), 1, 4, kind="mla", dims="BNHC")
    woven = KVLayout.from_tensors({"a": np.zeros((4, 6, 1, 8), np.uint8).transpose(1, 0, 2, 3)}, spec)
    (source,) = made(woven, woven, ([5, 0], [5, 0]), (0, 8)).sources
    assert (len(source.rows), source.rows_before, looks) == (5, 8, ["join_rows"])
