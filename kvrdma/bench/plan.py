"""Measures planning time per row: ``python -m kvrdma.bench.plan`` prints one JSON object per case."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec
import numpy as np

from kvrdma.bench.command import count
from kvrdma.layout import KVLayout, Storage
from kvrdma.plan import BlockSpan, Planner, ReadPlan, TokenRange
from kvrdma.plan.sketch import CacheSketch, sketch_layout
from kvrdma.topology import EngineShape, RankId, select_sources

ONE, RANK = EngineShape(1, 8), RankId(0, 0)
"""One rank on each side, 8 kv heads of 128 16-bit elements."""


@dataclass(frozen=True, slots=True)
class PlanCase:
    """One measurement: a request of ``blocks`` remote blocks over ``layers`` layers.

    ``regions_per_layer`` registers every layer by itself on both sides; block sizes are in tokens.
    """

    name: str
    layers: int
    blocks: int
    fragmented: bool = True
    regions_per_layer: bool = False
    local_block: int = 16
    remote_block: int = 16


@dataclass(frozen=True, slots=True)
class PlanResult:
    """What a case took, medians over fresh peers. Per row means per row before merging.

    ``prepare_ms`` is spent once per peer at the handshake; first and second are requests to that peer, and cold is
    the very first of the case, whose arrays lie in pages the process has not had before.
    """

    case: str
    rows_before: int
    rows: int
    reshapes: int
    prepare_ms: float
    cold_ns_per_row: float
    first_ns_per_row: float
    second_ns_per_row: float


CASES = (
    PlanCase("1k", 2, 512),
    PlanCase("16k", 32, 512),
    PlanCase("128k", 32, 4096),
    PlanCase("16k contiguous", 32, 512, fragmented=False),
    PlanCase("16k contiguous, a region per layer", 32, 512, fragmented=False, regions_per_layer=True),
    PlanCase("16k, blocks of 64 from 16, reshaped", 32, 512, local_block=64),
    PlanCase("16k, blocks of 16 from 64, by head", 32, 16, remote_block=64),
)


def bench_layout(case: PlanCase, block: int, base: int) -> KVLayout:
    """The layout of a rank whose cache is twice as large as the request."""
    names = tuple(f"layer.{i}" for i in range(case.layers))
    blocks = max(1, case.blocks * case.remote_block // block) * 2
    layout = sketch_layout(ONE, RANK, CacheSketch("HND", block, blocks, names, 256, 2), base)
    if not case.regions_per_layer:
        return layout
    each = layout.regions[0].nbytes // case.layers
    regions = tuple(Storage(base + i * (each + 4096), each) for i in range(case.layers))
    layers = tuple(
        msgspec.structs.replace(layer, planes=(msgspec.structs.replace(layer.planes[0], region=i, offset=0),))
        for i, layer in enumerate(layout.layers)
    )
    return msgspec.structs.replace(layout, regions=regions, layers=layers)


def run_plan_case(case: PlanCase, repeats: int) -> PlanResult:
    """Prepare a peer and plan two requests to it, ``repeats`` times."""
    local, remote = bench_layout(case, case.local_block, 1 << 41), bench_layout(case, case.remote_block, 1 << 40)
    rng = np.random.default_rng(1)
    tokens = case.blocks * case.remote_block
    spans = []
    for layout, block in ((local, case.local_block), (remote, case.remote_block)):
        pages, need = layout.layers[0].planes[0].num_pages, -(-tokens // block)
        spans.append(BlockSpan(rng.permutation(pages)[:need] if case.fragmented else np.arange(need)))
    times: list[tuple[int, int, int]] = []
    counts = (0, 0, 0)
    for _ in range(max(1, repeats)):  # a plan is dropped before the next peer's, as by an engine whose pull is done
        spent, plan = _round((local, remote), spans, tokens)
        times.append(spent)
        (reads,) = plan.sources
        counts = (reads.rows_before, len(reads.batch), len(plan.reshapes))
        del plan, reads
    prepare_ns, first_ns, second_ns = (statistics.median(column) for column in zip(*times, strict=True))
    cold_ns = times[0][1]
    per_row = [t / counts[0] for t in (cold_ns, first_ns, second_ns)]
    return PlanResult(case.name, *counts, prepare_ns / 1e6, *per_row)


def _round(
    layouts: tuple[KVLayout, KVLayout], spans: Sequence[BlockSpan], tokens: int
) -> tuple[tuple[int, int, int], ReadPlan]:
    """Nanoseconds to prepare, for the first request and for the second, and the second's plan."""
    times = [time.perf_counter_ns()]
    planner = Planner(layouts[0], {RANK: layouts[1]}, select_sources(ONE, RANK, ONE))
    times.append(time.perf_counter_ns())
    planner.plan([spans[0]], [spans[1]], TokenRange(0, tokens))
    times.append(time.perf_counter_ns())
    plan = planner.plan([spans[0]], [spans[1]], TokenRange(0, tokens))
    times.append(time.perf_counter_ns())
    return (times[1] - times[0], times[2] - times[1], times[3] - times[2]), plan


def results(repeats: int, scale: int = 1) -> Iterator[dict[str, object]]:
    """Run every case, with ``scale`` times fewer blocks."""
    for case in CASES:
        result = asdict(run_plan_case(replace(case, blocks=max(4, case.blocks // scale)), repeats))
        yield {key: round(value, 1) if isinstance(value, float) else value for key, value in result.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse options and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=count, default=20)
    parser.add_argument("--scale", type=count, default=1, help="divide the number of blocks, for a quick run")
    options = parser.parse_args(argv)
    machine = {"machine": platform.machine(), "python": platform.python_version(), "numpy": np.__version__}
    for result in results(options.repeats, options.scale):
        sys.stdout.write(json.dumps({"bench": "plan", **result, **machine}) + "\n")


if __name__ == "__main__":
    main()
