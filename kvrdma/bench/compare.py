"""`scripts/bench-link`: kvrdma, NIXL and Mooncake move the same rows in turns, as shares of a memcpy of them.

Every contender is a pair of processes of its own, frozen while the others have their turn. In each round every
contender reads four times; rounds begin with a different one each. The first read of a turn comes after all the others
have run, with nothing of its own left in the processor's caches (a server that does other work between its transfers);
the others, the steady ones, follow at once (one transfer after another). Medians of both kinds are reported, with the
spread and the CPU time of both ends. Prints one JSON object per case, then a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrdma.bench.command import count
from kvrdma.bench.patterns import Case, Shape
from kvrdma.bench.rivals.pair import JSON, Contender, Pair

MEMCPY = "memcpy"
_MIN_ITERS = 7
_STEADY = 3
_TUNED = {"UCX_CMA_TX_QUOTA": "64"}
_TCP = {"UCX_TLS": "tcp"}


@dataclass(frozen=True, slots=True)
class Lane:
    """Contenders that can be compared, and what they read."""

    name: str
    contenders: tuple[Contender, ...]
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """Interpreters and sizes from the command line."""

    nixl: str
    mooncake: str
    same_host: str
    """Transport of kvrdma for the same-host lane; empty: no such lane."""
    tcp: str
    nbytes: int
    iters: int


def _nixl(name: str, python: str, environ: Mapping[str, str], *, reader_thread: bool) -> Contender:
    reader, target = {"progress_thread": reader_thread}, {"progress_thread": True}
    return Contender(name, python, "nixl", reader, target, environ)


def _ours(name: str, transport: str, environ: Mapping[str, str]) -> Contender:
    arguments = {"transport": transport}
    return Contender(name, sys.executable, "ours", arguments, arguments, environ)


def _cases(nbytes: int, kinds: Sequence[tuple[str, int]]) -> tuple[Case, ...]:
    blocks = [(pattern, min(block, nbytes)) for pattern, block in kinds]
    return tuple(Case(pattern, Shape(1, nbytes // block, block)) for pattern, block in blocks)


def lanes(setup: Setup) -> Iterator[Lane]:
    """Say who is compared with whom."""
    memcpy = Contender(MEMCPY, sys.executable, "memcpy", target=None)
    if setup.same_host:
        rivals = []
        if setup.nixl:
            rivals = [
                _nixl("NIXL", setup.nixl, {}, reader_thread=True),
                _nixl("NIXL tuned", setup.nixl, _TUNED, reader_thread=False),
            ]
        kinds = [("fragmented", 4 << 10), ("fragmented", 32 << 10), ("fragmented", 1 << 20), ("contig", 32 << 10)]
        ours = _ours(f"kvrdma {setup.same_host}", setup.same_host, {})
        yield Lane("same host", (memcpy, ours, *rivals), _cases(setup.nbytes, kinds))
    if setup.tcp:
        rivals = []
        if setup.nixl:
            rivals = [
                _nixl("NIXL", setup.nixl, _TCP, reader_thread=True),
                _nixl("NIXL tuned", setup.nixl, _TCP, reader_thread=False),
            ]
        if setup.mooncake:
            rivals.append(Contender("Mooncake", setup.mooncake, "mooncake"))
        kinds = [("fragmented", 4 << 10), ("fragmented", 32 << 10), ("fragmented", 1 << 20)]
        ours = _ours(f"kvrdma {setup.tcp}", setup.tcp, _TCP)
        yield Lane("tcp", (memcpy, ours, *rivals), _cases(setup.nbytes, kinds))


def run_lane(lane: Lane, iters: int, logs: Path) -> Iterator[JSON]:
    """Measure one lane; gives one result per case.

    Raises:
        ContenderError: a contender's process failed.
    """
    pool_nbytes = max(case.shape.pool_nbytes for case in lane.cases)
    with ExitStack() as stack:
        pairs: list[Pair] = []
        for contender in lane.contenders:
            pair = Pair(contender, pool_nbytes, logs)
            stack.callback(pair.end)
            pairs.append(pair)
        for generation, case in enumerate(lane.cases, start=2):
            yield _run_case(lane.name, case, pairs, generation, iters)


def _run_case(lane: str, case: Case, pairs: Sequence[Pair], generation: int, iters: int) -> JSON:
    first_reads: dict[str, list[JSON]] = {pair.contender.name: [] for pair in pairs}
    steady_reads: dict[str, list[JSON]] = {pair.contender.name: [] for pair in pairs}
    wrong: dict[str, str] = {}
    for pair in pairs:
        with pair:
            pair.load(case, generation)
    for turn in range(iters):
        first = turn % len(pairs)
        for pair in [*pairs[first:], *pairs[:first]]:
            with pair:
                first_reads[pair.contender.name].append(pair.read())
                steady_reads[pair.contender.name] += [pair.read() for _ in range(_STEADY)]
    for pair in pairs:
        with pair:
            wrong[pair.contender.name] = pair.mismatch(generation)
    shape = case.shape
    return {
        "lane": lane,
        "pattern": case.pattern,
        "block_bytes": shape.block_bytes,
        "rows": shape.rows,
        "nbytes": shape.nbytes,
        "iters": iters,
        "contenders": {
            name: _summary(case, times, first_reads[MEMCPY])
            | {"steady": _summary(case, steady_reads[name], steady_reads[MEMCPY])}
            | {"verified": not wrong[name], "mismatch": wrong[name]}
            for name, times in first_reads.items()
        },
    }


def _summary(case: Case, times: Sequence[JSON], memcpy: Sequence[JSON]) -> JSON:
    def median(key: str) -> float:
        return float(statistics.median(each[key] for each in times))

    memcpy_s = statistics.median(each["total_s"] for each in memcpy)
    nbytes, total = case.shape.nbytes, sorted(each["total_s"] for each in times)
    return {
        "gb_per_s": {
            "min": round(nbytes / total[-1] / 1e9, 3),
            "median": round(nbytes / median("total_s") / 1e9, 3),
            "max": round(nbytes / total[0] / 1e9, 3),
        },
        "share_of_memcpy": round(memcpy_s / median("total_s"), 3),
        "held_ns_per_row": round(median("blocking_s") / case.shape.rows * 1e9, 1),
        "reader_cpu_ms": round(median("cpu_s") * 1e3, 2),
        "target_cpu_ms": round(median("target_cpu_s") * 1e3, 2),
    }


def markdown(results: Sequence[JSON]) -> str:
    """Write the table for people."""
    lines = [
        "| lane | rows | contender | GB/s (min-max) | of memcpy | steady | of memcpy | held ns/row | steady | CPU ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        rows = f"{result['pattern']} {result['rows']} x {result['block_bytes'] // 1024} KiB"
        for name, got in result["contenders"].items():
            rate, steady = got["gb_per_s"], got["steady"]
            lines.append(
                f"| {result['lane']} | {rows} | {name} | {rate['median']:.2f} ({rate['min']:.2f}-{rate['max']:.2f}) "
                f"| {got['share_of_memcpy']:.2f} "
                f"| {steady['gb_per_s']['median']:.2f} | {steady['share_of_memcpy']:.2f} "
                f"| {got['held_ns_per_row']:.0f} | {steady['held_ns_per_row']:.0f} "
                f"| {got['reader_cpu_ms']:.0f} + {got['target_cpu_ms']:.0f} |"
                + ("" if got["verified"] else " WRONG BYTES")
            )
    return "\n".join(lines)


def _setup(arguments: Sequence[str] | None) -> Setup:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, text in (
        ("same-host", "kvrdma's transport for the same-host lane"),
        ("tcp", "kvrdma's transport for the tcp lane"),
        ("nixl", "interpreter of a venv with nixl"),
        ("mooncake", "interpreter of a venv with mooncake-transfer-engine"),
    ):
        parser.add_argument(f"--{name}", default="", help=f"{text}; without it that part is left out")
    parser.add_argument("--nbytes", type=count, default=64 << 20, help="bytes of each read")
    parser.add_argument("--iters", type=count, default=9, help=f"rounds; at least {_MIN_ITERS} for figures")
    values: dict[str, Any] = vars(parser.parse_args(arguments))
    return Setup(**values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all lanes; gives the exit code: 0 if every contender's bytes were right."""
    setup = _setup(arguments)
    results: list[JSON] = []
    with tempfile.TemporaryDirectory(prefix="kvrdma-bench-") as logs:
        for lane in lanes(setup):
            for result in run_lane(lane, setup.iters, Path(logs)):
                results.append(result)
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()
    sys.stdout.write(f"\n{markdown(results)}\n")
    right = all(got["verified"] for result in results for got in result["contenders"].values())
    return 0 if right else 6


if __name__ == "__main__":
    sys.exit(main())
