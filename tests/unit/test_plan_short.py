"""Short requests are planned without NumPy: exactly as all others are, and only where nothing is out of the usual."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrdma.errors import PlanError
from kvrdma.layout import KVLayout
from kvrdma.page_format import LayerSpec
from kvrdma.plan import BlockSpan, Planner, ReadPlan, TokenRange, planner
from kvrdma.plan.short import _MAX_IDS, _MAX_PAGES, short_pieces
from kvrdma.topology import RankId
from tests.helpers.kv_cases import DIRECT
from tests.unit.test_plan import ONE, layout
from tests.unit.test_plan_pieces import two_planes

Ids = tuple[int, ...]


def from_tensors(blocks: int, dims: str) -> KVLayout:
    """Two layers of blocks of 4 tokens and 2 heads, token-major or head-major."""
    sizes = {"B": blocks, "N": 4, "H": 2, "C": 8}
    caches = {name: np.zeros([sizes[dim] for dim in dims], np.uint8) for name in "ab"}
    return KVLayout.from_tensors(caches, LayerSpec((0, 2), 2, 4, dims=dims))


PAIRS = {
    "one region": (layout(layers=3, pages=40), layout(layers=3, pages=50)),
    "a region each": (layout(layers=3, pages=40, split=True), layout(layers=3, pages=40)),
    "two planes": (two_planes(40), two_planes(40)),
    "both token-major": (from_tensors(40, "BNHC"), from_tensors(45, "BNHC")),
    "one token-major": (from_tensors(40, "BNHC"), from_tensors(40, "BHNC")),
}


def parts(plan: ReadPlan) -> list[tuple[Any, ...]]:
    """What a plan comes to, whatever the order of its rows."""
    return [(s.source, sorted(s.rows.tolist()), len(s.batch), s.rows_before, s.nbytes) for s in plan.sources]


def named(local: KVLayout, names: tuple[str, ...]) -> KVLayout:
    """Give the layers other names."""
    layers = tuple(msgspec.structs.replace(layer, name=name) for layer, name in zip(local.layers, names, strict=True))
    return msgspec.structs.replace(local, layers=layers)


@pytest.mark.parametrize("pair", PAIRS)
def test_it_plans_what_numpy_plans(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    local, remote = PAIRS[pair]
    names = tuple(layer.name for layer in local.layers)
    made = Planner(local, {RankId(0, 0): named(remote, names)}, ONE, DIRECT)
    rng, taken = random.Random(pair), 0
    for _ in range(150):
        count = rng.randint(1, 12)
        ids = [tuple(rng.sample(range(40), count)) for _ in range(2)]
        if rng.random() < 0.5:
            ids[1] = tuple((each + 3) % 40 for each in ids[0])  # many that follow each other on both sides
        start = rng.choice((0, 0, rng.randrange(4 * count)))
        tokens = TokenRange(start, rng.choice((4 * count, rng.randint(start, 4 * count))))
        first = rng.randint(0, start // 4)
        spans = [BlockSpan(each[first:], first) for each in ids]
        short = made.plan([spans[0]], [spans[1]], rng.choice((tokens, [tokens])))
        groups = made._groups
        taken += all(short_pieces(group, ([spans[0]], [spans[1]]), tokens) is not None for group in groups)
        with monkeypatch.context() as context:
            context.setattr(planner, "short_pieces", lambda *_: None)
            assert parts(short) == parts(made.plan([spans[0]], [spans[1]], tokens))
    assert taken > 100


PLAIN: tuple[Ids, Ids, TokenRange] = ((3, 1, 7), (2, 5, 4), TokenRange(0, 12))


@pytest.mark.parametrize(
    ("local", "remote", "tokens", "why"),
    [
        ((3, 1, 3), PLAIN[1], PLAIN[2], "local page 3 appears twice"),
        (PLAIN[0], (2, 2, 4), PLAIN[2], "remote page 2 appears twice"),
        ((3, 1, 10), PLAIN[1], PLAIN[2], "local page 10 is outside"),
        (PLAIN[0], (2, 10, 4), PLAIN[2], "remote page 10 is outside"),
        ((3, -1, 7), PLAIN[1], PLAIN[2], "local page -1 is outside"),
        (PLAIN[0], (-2, 5, 4), PLAIN[2], "remote page -2 is outside"),
        ((3, 1), PLAIN[1], PLAIN[2], "needs local page 2"),
        (PLAIN[0], (2, 5), PLAIN[2], "needs remote page 2"),
        ((3.0, 1, 7), PLAIN[1], PLAIN[2], "dtype float64"),
        (PLAIN[0], ("2", 5, 4), PLAIN[2], "flat list of integers"),
        ((3, 1, 7, 1 << 64), PLAIN[1], PLAIN[2], "dtype object"),
        (PLAIN[0], (2, 5, 4, -(1 << 64)), PLAIN[2], "dtype object"),
        (PLAIN[0], PLAIN[1], TokenRange(0, 1.5), "two integers"),  # type: ignore[arg-type]
        (PLAIN[0], PLAIN[1], TokenRange(-4, 8), "0 <= start"),
        (PLAIN[0], PLAIN[1], TokenRange(8, 4), "0 <= start"),
        (PLAIN[0], PLAIN[1], TokenRange(7, 5), "0 <= start"),
    ],
)
def test_what_is_wrong_is_told_by_the_planner(local: Any, remote: Any, tokens: TokenRange, why: str) -> None:  # noqa: ANN401
    made = Planner(layout(), {RankId(0, 0): layout()}, ONE)
    assert short_pieces(made._groups[0], ([BlockSpan(local)], [BlockSpan(remote)]), tokens) is None
    with pytest.raises(PlanError, match=why):
        made.plan([BlockSpan(local)], [BlockSpan(remote)], tokens)


@pytest.mark.parametrize(
    ("spans", "tokens"),
    [
        (([BlockSpan([3, 1, 7])], [BlockSpan(PLAIN[1])]), PLAIN[2]),
        (([BlockSpan(PLAIN[0])], [BlockSpan(np.array(PLAIN[1]))]), PLAIN[2]),
        (([BlockSpan(PLAIN[0])], [BlockSpan(PLAIN[1])]), TokenRange(4, 4)),
        (([BlockSpan(PLAIN[0])], [BlockSpan(PLAIN[1])]), TokenRange(5, 5)),
        (([BlockSpan((3, 1, 7, -1))], [BlockSpan(PLAIN[1])]), PLAIN[2]),
        (([BlockSpan((True, 2, 3))], [BlockSpan(PLAIN[1])]), PLAIN[2]),
        (([BlockSpan(tuple(range(_MAX_IDS)))], [BlockSpan(PLAIN[1])]), PLAIN[2]),
        (([BlockSpan(tuple(range(300)))], [BlockSpan(tuple(range(300)))]), TokenRange(0, 4 * _MAX_PAGES + 1)),
    ],
)
def test_what_is_not_usual_is_left_to_the_planner(spans: Any, tokens: TokenRange) -> None:  # noqa: ANN401
    big = layout(pages=2000)
    made = Planner(big, {RankId(0, 0): big}, ONE)
    assert short_pieces(made._groups[0], spans, tokens) is None
    assert made.plan(spans[0], spans[1], tokens).nbytes == 16 * (tokens.end - tokens.start)
