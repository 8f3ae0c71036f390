"""Random pairs of engines and requests, and the run that compares a plan with the oracle byte for byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvrdma.plan import BlockSpan, Planner, ReadCost, ReadPlan, TokenRange
from kvrdma.plan.finish import check_bounds, join_rows
from kvrdma.topology import EngineShape, RankId, Source, select_sources
from tests.helpers import kv_oracle as kv

BLOCKS = (4, 6, 8, 12, 16, 24, 32, 64, 128)
DIRECT, BALANCED, RESHAPE = ReadCost(0.0, 1.0), ReadCost(600.0, 0.1), ReadCost(1e9, 0.0)


@dataclass(frozen=True)
class Group:
    """One KV group of a request."""

    tokens: TokenRange
    local: kv.Blocks
    remote: kv.Blocks


@dataclass(frozen=True)
class Case:
    """A pair of engines and one request."""

    local: kv.EngineModel
    remote: kv.EngineModel
    layers: tuple[str, ...]
    layer_groups: dict[str, int]
    groups: tuple[Group, ...]
    rank: RankId
    computed: int
    elems: int
    dtype: str
    split: bool
    cost: ReadCost
    seed: int


def _shape(rng: random.Random, heads: int, *, mla: bool, layers: tuple[str, ...], block: int) -> EngineShape:
    total = 1 if mla else heads
    parts = rng.choice([n for n in (1, 2, 3, 4, 6, 8) if n % total == 0 or total % n == 0])
    dcp = rng.choice((1, 1, 1, 2, 3, 4))
    across = rng.random() < 0.3
    interleave = rng.choice([n for n in (1, 2, 3, 4, 8, block) if block % n == 0])
    stages: tuple[tuple[str, ...], ...] = ()
    if rng.random() < 0.4:
        cut = rng.randrange(len(layers) + 1)
        stages = tuple(stage for stage in (layers[:cut], layers[cut:]) if stage)
    return EngineShape(parts if across else parts * dcp, heads, dcp, interleave, mla, across, stages)


def _engine(rng: random.Random, heads: int, formats: tuple[str, ...], layers: tuple[str, ...]) -> kv.EngineModel:
    block = rng.choice(BLOCKS)
    fmt = rng.choice(formats)
    page = block
    if fmt in kv.SPLITTABLE and rng.random() < 0.2:
        page = rng.choice([n for n in range(1, block + 1) if block % n == 0])
    shape = _shape(rng, heads, mla=fmt.startswith("MLA"), layers=layers, block=block)
    return kv.EngineModel(shape, fmt, block, page, blocks=0)


def _ids(rng: random.Random, count: int, pool: int) -> tuple[int, ...]:
    if rng.random() < 0.4:
        first = rng.randrange(pool - count + 1)
        return tuple(range(first, first + count))
    return tuple(rng.sample(range(pool), count))


def _group(rng: random.Random, case_tokens: TokenRange, engines: tuple[kv.EngineModel, kv.EngineModel]) -> Group:
    tokens, window = case_tokens, None
    if rng.random() < 0.3:
        window = rng.randrange(1, 80)
        tokens = tokens.last(window)
    spans = []
    for engine in engines:
        per_block = engine.block * engine.shape.dcp_size
        count = -(-tokens.end // per_block) + rng.choice((0, 0, 1, 2))
        first = rng.randrange(tokens.start // per_block + 1) if window else 0
        ids = _ids(rng, count, engine.blocks)
        spans.append(kv.Blocks(ids[first:], first))
    return Group(tokens, spans[0], spans[1])


def random_case(rng: random.Random, formats: tuple[tuple[str, ...], tuple[str, ...]] | None = None) -> Case:
    """Draw a case; every draw goes through ``rng``, so that hypothesis can shrink it."""
    layers = tuple(f"layer.{i}" for i in range(rng.choice((1, 2, 2, 3))))
    mla, split = rng.random() < 0.2, rng.random() < 0.85
    both: tuple[str, ...] = kv.ATTENTION + kv.PAIRS + ("CPU",) if split else kv.ATTENTION[:5]
    both = ("MLA", "MLA-outer") if mla else both
    heads = rng.choice((1, 2, 3, 4, 6, 8))
    local_formats, remote_formats = formats or (both, both)
    local = _engine(rng, heads, local_formats, layers)
    remote = _engine(rng, heads, remote_formats, layers)
    length = rng.choice((rng.randint(1, 40), rng.randint(1, 150), rng.randint(1, 400)))
    start = rng.choice((0, 0, rng.randint(0, length), length // local.block * local.block))
    need = [-(-length // (e.block * e.shape.dcp_size)) + 4 for e in (local, remote)]
    local, remote = (replace(e, blocks=n) for e, n in zip((local, remote), need, strict=True))
    names = list(layers)
    groups = {name: rng.randrange(2) for name in names} if rng.random() < 0.3 else dict.fromkeys(names, 0)
    wanted = TokenRange(start, length)
    elems = rng.choice((2, 4, 6)) if split else rng.choice((1, 3, 5, 6))
    rank = rng.choice(local.shape.all_ranks())
    return Case(
        local, remote, layers, groups, tuple(_group(rng, wanted, (local, remote)) for _ in range(2)), rank,
        length + rng.choice((0, 1, 5)), elems, rng.choice(("uint8", "uint16", "uint32")), split,
        rng.choice((DIRECT, BALANCED, RESHAPE)), rng.randrange(1 << 30),
    )  # fmt: skip


@dataclass
class Ran:
    """What a run left behind, for further checks."""

    plan: ReadPlan
    consumer: kv.RankCache
    producers: dict[RankId, kv.RankCache]
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Tamper:
    """A deliberate mistake between request and result, to show that the comparison sees it."""

    plan: Callable[[ReadPlan], ReadPlan] = lambda plan: plan
    request: Callable[[Case, Group], tuple[BlockSpan, BlockSpan, TokenRange]] = lambda _, group: (
        BlockSpan(group.local.ids, group.local.first),
        BlockSpan(group.remote.ids, group.remote.first),
        group.tokens,
    )


_honest = Tamper()


def build(case: Case) -> tuple[kv.RankCache, dict[RankId, kv.RankCache], tuple[Source, ...], kv.Truth]:
    """Allocate the consumer rank and its sources, and invent the truth."""
    made: dict[str, Any] = {
        "elems": case.elems,
        "dtype": case.dtype,
        "layers": case.layers,
        "split": case.split,
    }
    consumer = kv.make_rank(case.local, case.rank, {**made, "poison": kv.CONSUMER_POISON}, case.layer_groups)
    sources = select_sources(case.local.shape, case.rank, case.remote.shape)
    producers = {
        s.rank: kv.make_rank(case.remote, s.rank, {**made, "poison": kv.PRODUCER_POISON}, case.layer_groups)
        for s in sources
    }
    rng = np.random.default_rng(case.seed)
    top = int(np.iinfo(case.dtype).max)
    truth: kv.Truth = {}
    for name in case.layers:
        parts = consumer.parts.get(name) or next(iter(consumer.parts.values()))
        size = (case.local.shape.total_heads, case.computed)
        truth[name] = {
            part: rng.integers(0, top, (*size, view.shape[-1]), dtype=case.dtype, endpoint=True)
            for part, view in parts.items()
        }
    return consumer, producers, sources, truth


def run_case(case: Case, *, slow: bool = False, tamper: Tamper = _honest) -> Ran:
    """Plan, read, reshape; then compare every byte of every storage of the consumer with the oracle."""
    write = kv.write_slow if slow else kv.write_fast
    consumer, producers, sources, truth = build(case)
    for cache in producers.values():
        for name in cache.parts:
            group = case.groups[case.layer_groups[name]]
            reach = min(case.computed, (group.remote.first + len(group.remote.ids)) * _block(case.remote))
            low = group.remote.first * _block(case.remote)
            write(cache, truth, name, group.remote, range(low, max(low, reach)))
    before = [storage.copy() for storage in consumer.storages]
    for name in consumer.parts:
        group = case.groups[case.layer_groups[name]]
        write(consumer, truth, name, group.local, range(*group.tokens))
    expected = [storage.copy() for storage in consumer.storages]
    for storage, original in zip(consumer.storages, before, strict=True):
        storage[:] = original
    planner = Planner(consumer.layout, {r: c.layout for r, c in producers.items()}, sources, case.cost)
    local, remote, tokens = zip(*(tamper.request(case, group) for group in case.groups), strict=True)
    honest = planner.plan(local, remote, tokens)
    for each in honest.sources:
        theirs = producers[each.source.rank].layout.regions
        check_bounds(each.rows, consumer.layout.regions, theirs)
        assert len(join_rows(each.rows, consumer.layout.regions)) == len(each.rows), (case, "rows are left to join")
    plan = tamper.plan(honest)
    kv.read_rows(consumer, producers, plan)
    for step in plan.reshapes:
        kv.run_reshape(consumer, step)
    assert kv.differing(consumer.storages, expected) == [], case
    return Ran(plan, consumer, producers, sources)


def _block(engine: kv.EngineModel) -> int:
    return engine.block * engine.shape.dcp_size
