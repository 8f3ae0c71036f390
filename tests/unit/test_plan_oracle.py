"""Every byte of a planned read against the oracle: random pairs of engines, exhaustive small prompts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvrdma.errors import PlanError
from kvrdma.plan import BlockSpan, PageReshape, ReadPlan, TokenRange
from kvrdma.reshape import PagedMemory, apply_at
from kvrdma.topology import EngineShape, RankId
from tests.helpers import kv_oracle as kv
from tests.helpers.kv_cases import BALANCED, RESHAPE, Case, Group, Tamper, random_case, run_case

SHARDS, PER_SHARD = 20, 1000


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_engines(shard: int) -> None:
    """20,000 seeded cases in all; a failure names its case, whose seed is in the message."""
    reshaped = read = 0
    for seed in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
        try:
            ran = run_case(random_case(random.Random(seed)))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        reshaped += bool(ran.plan.reshapes)
        read += bool(ran.plan.nbytes)
    assert read > PER_SHARD * 0.7
    assert reshaped > PER_SHARD * 0.05


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_random_engines_shrinkable(rng: random.Random) -> None:
    """The same with the oracle that moves one (layer, head, token) at a time."""
    run_case(random_case(rng), slow=True)


def test_fast_oracle_equals_the_slow_one() -> None:
    for seed in range(150):
        case = random_case(random.Random(seed))
        fast, slow = run_case(case), run_case(case, slow=True)
        assert kv.differing(fast.consumer.storages, slow.consumer.storages) == []
        for rank, cache in fast.producers.items():
            assert kv.differing(cache.storages, slow.producers[rank].storages) == []


def _apply_for_real(cache: kv.RankCache, step: PageReshape) -> None:
    """Run the reshape as the engine does: on pages described by the layout alone."""
    layout = cache.layout
    for name in step.layers:
        layer = layout.by_name()[name]
        plane = layer.planes[step.plane]
        addr = layout.regions[plane.region].addr + plane.offset
        nbytes = layout.format_of(layer).plane_extent(step.plane)
        apply_at(step.reshape, PagedMemory(addr, plane.page_stride, plane.num_pages, nbytes), step.pages)


@pytest.mark.needs("torch")
def test_the_reshape_package_finishes_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's reshapes, run by the CPU path that engines use instead of the test's own numpy lines."""
    monkeypatch.setattr(kv, "run_reshape", _apply_for_real)
    steps = 0
    for seed in range(600):
        case = replace(random_case(random.Random(seed)), cost=RESHAPE)
        steps += len(run_case(case).plan.reshapes)
    assert steps > 60


def prompt_case(prompt: int, block: int, cached: int, extra: int, *, order: int) -> Case:
    """A consumer with a cached prefix whose blocks hold ``extra`` tokens more than the producer's prompt."""
    remote_block = 20 - block
    rng = random.Random(prompt * 1000 + cached + order)
    engines = [kv.EngineModel(EngineShape(1, 2), fmt, b, b, 64) for fmt, b in (("HND", block), ("NHD", remote_block))]
    counts = [-(-(prompt + extra) // block) + 1, -(-prompt // remote_block) + 2]
    ids = [tuple(rng.sample(range(64), n)) if order else tuple(range(n)) for n in counts]
    group = Group(TokenRange(min(cached, prompt), prompt), kv.Blocks(ids[0]), kv.Blocks(ids[1]))
    engines = [replace(e, blocks=64) for e in engines]
    return Case(
        engines[0], engines[1], ("layer.0",), {"layer.0": 0}, (group,), RankId(0, 0), prompt, 2, "uint8",
        split=True, cost=RESHAPE if order else BALANCED, seed=prompt,
    )  # fmt: skip


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("block", [4, 16])
def test_every_prompt_and_cached_prefix(block: int, extra: int) -> None:
    """Prompts 1..200 with every cached prefix of whole blocks, and one that ends inside a block."""
    for prompt in range(1, 201):
        for cached in [*range(0, prompt + 1, block), max(0, prompt - 1)]:
            ran = run_case(prompt_case(prompt, block, cached, extra, order=prompt % 2))
            assert ran.plan.nbytes == (prompt - min(cached, prompt)) * 2 * 2


def _from_the_tail(case: Case, group: Group) -> tuple[BlockSpan, BlockSpan, TokenRange]:
    """Line up the last blocks of both lists, as if neither side had lookahead blocks."""
    local, remote = (
        BlockSpan(group.local.ids, group.local.first),
        BlockSpan(group.remote.ids, group.remote.first),
    )
    sizes = [e.block * e.shape.dcp_size for e in (case.local, case.remote)]
    ends = [(s.first + len(s.ids)) * n for s, n in zip((local, remote), sizes, strict=True)]
    return local, BlockSpan(remote.ids, remote.first + (ends[0] - ends[1]) // sizes[1]), group.tokens


def _list_order(_: Case, group: Group) -> tuple[BlockSpan, BlockSpan, TokenRange]:
    return BlockSpan(sorted(group.local.ids), group.local.first), BlockSpan(group.remote.ids), group.tokens


def _drop_last_row(plan: ReadPlan) -> ReadPlan:
    return ReadPlan(tuple(structs.replace(s, batch=s.rows[:-1]) for s in plan.sources), plan.reshapes)


def _one_byte_more(plan: ReadPlan) -> ReadPlan:
    return ReadPlan(
        tuple(structs.replace(s, batch=s.rows + np.array([0, 0, 0, 1], np.uint64)) for s in plan.sources),
        plan.reshapes,
    )


def _swap_two(plan: ReadPlan) -> ReadPlan:
    def swapped(rows: np.ndarray) -> np.ndarray:
        rows = rows.copy()
        rows[:2, 2] = rows[1::-1, 2]
        return rows

    return ReadPlan(tuple(structs.replace(s, batch=swapped(s.rows)) for s in plan.sources), plan.reshapes)


MISTAKES = {
    "from the tail": (Tamper(request=_from_the_tail), 200),
    "list order": (Tamper(request=_list_order), 120),
    "a row missing": (Tamper(_drop_last_row), 300),
    "a byte too many": (Tamper(_one_byte_more), 300),
    "two rows swapped": (Tamper(_swap_two), 250),
    "no reshape": (Tamper(lambda plan: ReadPlan(plan.sources, ())), 20),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_mistakes(mistake: str) -> None:
    """Of 400 random cases, so many at least must fail with each mistake made on purpose."""
    tamper, least = MISTAKES[mistake]
    seen = 0
    for seed in range(400):
        try:
            run_case(random_case(random.Random(seed)), tamper=tamper)
        except (AssertionError, PlanError):
            seen += 1
    assert seen >= least
