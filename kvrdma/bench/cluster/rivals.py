"""The same rows by other libraries, in the same run: each rank runs them in a process of its own."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvrdma.bench.choose import AUTO, open_candidates
from kvrdma.bench.cluster.exchange import Exchange, wait_count
from kvrdma.bench.cluster.scenario import Scenario
from kvrdma.bench.link import LinkOptions
from kvrdma.bench.patterns import Case, Shape
from kvrdma.bench.rivals.pair import JSON, Child, Contender, ContenderError

LOOPBACK = "127.0.0.1"
_STEP_S = 180.0


def contenders(scenario: Scenario, host: str) -> list[Contender]:
    """List who takes part; nobody where the scenario names no rival."""
    wanted = scenario.rivals
    if not (wanted.nixl or wanted.mooncake):
        return []
    mine = {"transport": scenario.transports[0] if scenario.transports else _transport(near=host == LOOPBACK)}
    found = [Contender("kvrdma", sys.executable, "ours", mine, mine)]
    if wanted.nixl:
        thread = {"progress_thread": True}
        found.append(Contender("NIXL", wanted.nixl, "nixl", thread, thread))
    if wanted.mooncake:
        found.append(Contender("Mooncake", wanted.mooncake, "mooncake", {"host": host}, {"host": host}))
    return found


def _transport(*, near: bool) -> str:
    """Give the best transport that reaches the others."""
    reaches = ("host", "network") if near else ("network",)
    candidates = open_candidates(AUTO, LinkOptions())
    try:
        return next(each.name for each in candidates.transports if each.capabilities().reach in reaches)
    finally:
        candidates.close()


def case_of(scenario: Scenario) -> Case:
    """Give the rows of one request on one consumer rank, at random or in order."""
    kv, group = scenario.kv, scenario.consumer
    blocks = -(-scenario.prompt.tokens // (group.block * group.dcp))
    page = kv.page_bytes(group.tp // group.dcp, group.block)
    layers = -(-kv.layers // group.pp)
    return Case("fragmented" if scenario.fragmentation else "contig", Shape(layers, blocks, page), scenario.seed)


def compare(scenario: Scenario, number: int, exchange: Exchange, host: str) -> list[JSON]:
    """Do this rank's part in the comparison: producers hold a pool, consumers read one of them, all at once.

    Raises:
        UnreachableError: another rank does not go on.
    """
    producers = scenario.producer.engines * scenario.producer.ranks
    readers = scenario.consumer.engines * scenario.consumer.ranks
    results: list[JSON] = []
    for contender in contenders(scenario, host):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            if number < producers:
                _hold(contender, scenario, number, exchange, log, readers)
            else:
                source = (number - producers) % producers
                results.append(_read(contender, scenario, source, exchange, log, readers))
    return results


def _hold(contender: Contender, scenario: Scenario, number: int, exchange: Exchange, log: Path, readers: int) -> None:
    child = Child(contender, contender.target or {}, log)
    try:
        try:
            meta = child.ask("open", nbytes=case_of(scenario).shape.pool_nbytes, generation=1)
        except ContenderError as error:
            meta = {"error": str(error)}
        exchange.put(f"rival/{contender.name}/{number}", meta)
        wait_count(exchange, f"rival/{contender.name}/done", readers, _STEP_S)
    finally:
        child.end()


def _read(contender: Contender, scenario: Scenario, source: int, exchange: Exchange, log: Path, readers: int) -> JSON:
    times: list[JSON] = []
    child = Child(contender, contender.reader, log)
    try:
        _load(child, exchange.get(f"rival/{contender.name}/{source}", _STEP_S), case_of(scenario))
        exchange.add(f"rival/{contender.name}/warm")
        wait_count(exchange, f"rival/{contender.name}/warm", readers, _STEP_S)
        times = [child.ask("read") for _ in range(scenario.rivals.rounds)]
        mismatch = str(child.ask("verify", generation=1)["mismatch"])
    except ContenderError as error:
        exchange.add(f"rival/{contender.name}/warm")  # the others need not wait
        mismatch = str(error)
    finally:
        exchange.add(f"rival/{contender.name}/done")
        child.end()
    return {
        "name": contender.name,
        "error": mismatch,
        "seconds": [each["total_s"] for each in times],
        "held_s": [each["blocking_s"] for each in times],
    }


def _load(child: Child, meta: JSON, case: Case) -> None:
    """Connect, prepare the case and read it once."""
    if "error" in meta:
        raise ContenderError(meta["error"])
    child.ask("open", nbytes=case.shape.pool_nbytes, generation=0)
    child.ask("connect", meta=meta["meta"], addr=meta["addr"])
    shape = [case.shape.layers, case.shape.blocks, case.shape.block_bytes]
    child.ask("load", pattern=case.pattern, shape=shape, seed=case.seed)
    child.ask("read")


def table(scenario: Scenario, per_rank: Sequence[Sequence[JSON]]) -> list[JSON]:
    """Sum up, per contender: the bytes of all readers over the slowest reader of each round."""
    flat = [each for ranks in per_rank for each in ranks]
    case = case_of(scenario)
    found = []
    for name in dict.fromkeys(each["name"] for each in flat):
        mine = [each for each in flat if each["name"] == name]
        errors = [each["error"] for each in mine if each["error"]]
        row: JSON = {"name": name, "readers": len(mine), "rows": case.shape.rows, "block_bytes": case.shape.block_bytes}
        if errors:
            found.append({**row, "verified": False, "error": errors[0]})
            continue
        rounds = [max(seconds) for seconds in zip(*(each["seconds"] for each in mine), strict=True)]
        speeds = [len(mine) * case.shape.nbytes / seconds / 1e9 for seconds in rounds]
        held = statistics.median(s for each in mine for s in each["held_s"]) / case.shape.rows * 1e9
        found.append(
            row
            | {
                "verified": True,
                "gb_per_s": {"min": round(min(speeds), 4), "median": round(statistics.median(speeds), 4),
                             "max": round(max(speeds), 4)},
                "held_ns_per_row": round(held, 1),
            }
        )  # fmt: skip
    return found
