"""The reshape a page needs: derived from any transpose, equal to DESIGN.md's examples, chosen by cost."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from kvrdma.plan import ReadCost, TokenRange
from kvrdma.plan.landing import Unit, _transpose, factorise
from kvrdma.topology import EngineShape, RankId
from tests.helpers import kv_oracle as kv
from tests.helpers.kv_cases import DIRECT, RESHAPE, Case, Group, Ran, run_case


def source_of(shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape).transpose(axes).ravel()


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_factorise_finds_every_transpose(ndim: int) -> None:
    rng = random.Random(ndim)
    for _ in range(60):
        shape = tuple(rng.randint(1, 4) for _ in range(ndim))
        for axes in itertools.permutations(range(ndim)):
            source = source_of(shape, axes)
            found = factorise(source)
            assert found is not None, (shape, axes)
            assert (source_of(*found) == source).all()
            assert len(found[0]) <= ndim


def test_factorise_refuses_what_is_no_transpose() -> None:
    for source in (
        [0, 2, 4, 6],
        [1, 0, 2],
        [0, 2, 1],
        [0, 2, 1, 3, 5, 4],
        [0, 1, 3, 2],
        [0, 4, 1, 5, 2, 3],
        [0, 0, 1, 1],
    ):
        assert factorise(np.array(source)) is None


def one_case(local: kv.EngineModel, remote: kv.EngineModel, tokens: int, rank: int = 0, *, elems: int = 8) -> Case:
    counts = [-(-tokens // (e.block * e.shape.dcp_size)) for e in (local, remote)]
    spans = [kv.Blocks(tuple(range(1, n + 1))) for n in counts]
    local, remote = (replace(e, blocks=n + 2) for e, n in zip((local, remote), counts, strict=True))
    group = Group(TokenRange(0, tokens), *spans)
    return Case(
        local, remote, ("layer.0",), {"layer.0": 0}, (group,), RankId(0, rank), tokens, elems, "uint16",
        split=True, cost=RESHAPE, seed=1,
    )  # fmt: skip


def model(fmt: str, block: int, shape: EngineShape) -> kv.EngineModel:
    return kv.EngineModel(shape, fmt, block, block, 0)


def reshape_of(ran: Ran) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    (step,) = ran.plan.reshapes
    assert (step.reshape.offset, step.reshape.count) == (0, 1)
    return step.reshape.shape, step.reshape.axes, step.reshape.itemsize


H2 = EngineShape(1, 2)


def test_smaller_remote_blocks() -> None:
    """(r, H, n, C) -> (H, r, n, C): 4 blocks of 2 heads x 4 tokens x 8 elements; n and C stay together."""
    ran = run_case(one_case(model("HND", 16, H2), model("HND", 4, H2), 32))
    assert reshape_of(ran) == ((4, 2, 32), (1, 0, 2), 2)
    assert ran.plan.sources[0].rows_before == 8
    assert len(ran.plan.sources[0].rows) == 1
    assert ran.plan.reshapes[0].pages.tolist() == [1, 2]


def test_hnd_into_nhd() -> None:
    """(H, n, C) -> (n, H, C), and with blocks of a quarter (r, H, n, C) -> (r, n, H, C)."""
    ran = run_case(one_case(model("NHD", 16, H2), model("HND", 16, H2), 16))
    assert reshape_of(ran) == ((2, 16, 8), (1, 0, 2), 2)
    ran = run_case(one_case(model("NHD", 16, H2), model("HND", 4, H2), 16))
    assert reshape_of(ran) == ((4, 2, 4, 8), (0, 2, 1, 3), 2)


def test_several_nhd_sources() -> None:
    """(R, N, h, C) -> (N, R, h, C): 2 ranks of 2 heads into 16 tokens of 4 heads."""
    ran = run_case(one_case(model("NHD", 16, EngineShape(1, 4)), model("NHD", 16, EngineShape(2, 4)), 16))
    assert reshape_of(ran) == ((2, 16, 16), (1, 0, 2), 2)
    assert [len(s.rows) for s in ran.plan.sources] == [1, 1]


def test_dcp_interleave() -> None:
    """(W, k, I, C) -> (k, W, I, C): 2 ranks, interleave 4, 16 tokens: k = 2 stretches of 4 x 8 elements."""
    mla = EngineShape(1, 1, is_mla=True)
    remote = EngineShape(2, 1, 2, 4, is_mla=True)
    ran = run_case(one_case(model("MLA", 16, mla), model("MLA", 8, remote), 32))
    assert reshape_of(ran) == ((2, 2, 32), (1, 0, 2), 2)


def test_cpu_keys() -> None:
    """Per head (r, D, n) -> (D, r, n) with D = 4, n = 32, r = 2; values, 512 bytes later, land in place."""
    case = replace(one_case(model("CPU", 64, H2), model("CPU", 32, H2), 64), cost=ReadCost(100.0, 0.3))
    ran = run_case(case)
    (step,) = ran.plan.reshapes
    assert (step.reshape.shape, step.reshape.axes, step.reshape.itemsize) == ((2, 4, 32), (1, 0, 2), 2)
    assert (step.reshape.offset, step.reshape.stride, step.reshape.count) == (0, 1024, 2)
    assert ran.plan.sources[0].rows_before == 2 * (2 + 2)


def test_cpu_pages_in_one_row_each() -> None:
    """(r, H, 2, n D) -> (H, 2, r, n D) first, so that each small page is one row."""
    ran = run_case(one_case(model("CPU", 64, H2), model("CPU", 32, H2), 64))
    move, turn = (step.reshape for step in ran.plan.reshapes)
    assert (move.shape, move.axes, move.itemsize) == ((2, 4, 128), (1, 0, 2), 2)
    assert (turn.shape, turn.axes, turn.offset, turn.stride, turn.count) == ((2, 4, 32), (1, 0, 2), 0, 1024, 2)
    assert ran.plan.sources[0].rows_before == 2


def test_token_major_into_cpu() -> None:
    """One row a page: (N, H, 2, D) -> (H, 2, N, D), then the keys of each head from [N, D] to [D, N]."""
    ran = run_case(one_case(model("CPU", 32, H2), model("NHD", 32, H2), 64))
    move, turn = (step.reshape for step in ran.plan.reshapes)
    assert (move.shape, move.axes, move.itemsize) == ((32, 4, 4), (1, 0, 2), 2)
    assert (turn.shape, turn.axes, turn.itemsize) == ((32, 4), (1, 0), 2)
    assert (turn.offset, turn.stride, turn.count) == (0, 512, 2)
    assert (ran.plan.sources[0].rows_before, len(ran.plan.sources[0].rows)) == (2, 1)


def test_cpu_into_token_major() -> None:
    """The same backwards, from blocks of half the size: each head's keys are turned where they landed, first."""
    ran = run_case(one_case(model("NHD", 32, H2), model("CPU", 16, H2), 32))
    turn, move = (step.reshape for step in ran.plan.reshapes)
    assert (turn.shape, turn.axes, turn.itemsize) == ((4, 16), (1, 0), 2)
    assert (turn.offset, turn.stride, turn.count) == (0, 256, 4)
    assert (move.shape, move.axes, move.itemsize) == ((2, 4, 16, 4), (0, 2, 1, 3), 2)
    assert (ran.plan.sources[0].rows_before, len(ran.plan.sources[0].rows)) == (2, 1)


def test_interleaved_content_into_leading_two() -> None:
    """A page with K and V beside each other per token becomes keys, then values: (N, 2, D) -> (2, N, D)."""
    ran = run_case(one_case(model("B2NHC", 16, H2), model("NHD", 16, H2), 16))
    assert reshape_of(ran) == ((32, 2, 4), (1, 0, 2), 2)


def test_equal_pages_need_nothing() -> None:
    ran = run_case(one_case(model("HND", 16, H2), model("HND", 16, H2), 64))
    assert ran.plan.reshapes == ()
    assert (ran.plan.sources[0].rows_before, len(ran.plan.sources[0].rows)) == (4, 1)


def test_larger_remote_blocks_need_nothing() -> None:
    """16 of 128: a row per head, already in place; a reshape would not save one."""
    ran = run_case(one_case(model("HND", 16, H2), model("HND", 128, H2), 128))
    assert ran.plan.reshapes == ()
    assert ran.plan.sources[0].rows_before == 16


def test_partial_pages_are_read_directly() -> None:
    """Of 24 tokens in blocks of 16, only the full page is reshaped; the other has rows by token and head."""
    case = one_case(model("NHD", 16, H2), model("HND", 16, H2), 24)
    ran = run_case(case)
    assert ran.plan.reshapes[0].pages.tolist() == [1]
    assert ran.plan.sources[0].rows_before == 1 + 8 * 2
    (group,) = case.groups
    prefix = run_case(replace(case, groups=(replace(group, tokens=TokenRange(1, 24)),)))
    assert prefix.plan.reshapes == ()


@pytest.mark.parametrize("remote", [*kv.ATTENTION, *kv.PAIRS, "CPU"])
@pytest.mark.parametrize("local", [*kv.ATTENTION, *kv.PAIRS, "CPU"])
def test_every_pair_of_formats(local: str, remote: str) -> None:
    """All bytes, read directly or reshaped, from half the heads a rank and from blocks of half and twice the size."""
    for local_block, remote_block in ((8, 8), (8, 4), (4, 8)):
        for cost in (DIRECT, RESHAPE):
            engines = model(local, local_block, H2), model(remote, remote_block, EngineShape(2, 2))
            run_case(replace(one_case(*engines, 19), cost=cost))


def test_units_must_agree() -> None:
    """Two units of four 8-byte atoms: the first landed transposed, the second in place."""
    stretch, inner = np.repeat([0, 1], 4), np.tile([0, 8, 16, 24], 2)
    turned, kept = [0, 16, 8, 24], [0, 8, 16, 24]
    sizes = np.full(8, 8), Unit(0, 32, 2, 32)
    assert _transpose(stretch, inner, np.array(turned + turned), sizes) == ((2, 2), (1, 0), 8)
    assert _transpose(stretch, inner, np.array(turned + kept), sizes) is None


def test_cost_decides() -> None:
    """32 rows against 1 row and a reshape of 512 bytes: worth it while 31 rows cost more than the bytes."""
    case = one_case(model("NHD", 16, H2), model("HND", 16, H2), 16)
    for cost, expected in ((DIRECT, 0), (RESHAPE, 1), (ReadCost(100.0, 6.0), 1), (ReadCost(100.0, 6.1), 0)):
        assert len(run_case(replace(case, cost=cost)).plan.reshapes) == expected
