"""Runs one rank of a multi-node benchmark from the meeting to the report."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from typing import Any

from kvrdma.bench.cluster import rivals
from kvrdma.bench.cluster.consumer import ConsumerRank, Outcome
from kvrdma.bench.cluster.counters import difference, nic_bytes
from kvrdma.bench.cluster.exchange import Exchange, wait_count
from kvrdma.bench.cluster.producer import ProducerRank
from kvrdma.bench.cluster.rank import START_S, Member, Place, bench_config, join, place_of
from kvrdma.bench.cluster.scenario import Scenario
from kvrdma.bench.cluster.summary import JSON, rank_report, total_report, whole_report
from kvrdma.config import Config
from kvrdma.errors import KVRDMAError

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Seat:
    """Where a process sits."""

    number: int
    """Among all processes."""
    world: int
    local: int = 0
    """Among those of its host: the first one counts the bytes of the NICs."""
    listen: str | None = None
    """Address of this host towards the others."""


def run_rank(scenario: Scenario, seat: Seat, exchange: Exchange, config: Config, say: Say) -> JSON | None:
    """Do a rank's part.

    Returns:
        The report of all ranks, to rank 0; None to others.

    Raises:
        KVRDMAError: this rank or another one failed. All ranks then end within ``START_S`` and the scenario's timeout.
    """
    place = place_of(scenario, seat.number, seat.world)
    member = join(scenario, place, exchange, bench_config(scenario, config, seat.listen))
    try:
        before = nic_bytes() if seat.local == 0 else {}  # and not later: other ranks of this host may begin first
        exchange.add("ready")
        wait_count(exchange, "ready", seat.world, START_S)
        say(f"{place.engine_id} rank {tuple(place.rank)} at {member.engine.endpoint}")
        report = _work(member, place)
        exchange.add("finished")
        wait_count(exchange, "finished", seat.world, START_S + member.timeout_s)  # producers outlive their readers
        if seat.local == 0:
            report["nics"] = difference(before, nic_bytes())
    finally:
        member.engine.close()
    compared = rivals.compare(scenario, seat.number, exchange, seat.listen or rivals.LOOPBACK)
    exchange.put(f"report/{seat.number}", {**report, "rivals": compared})
    return None if seat.number else _gather(scenario, seat, exchange)  # rank 0 may hold the store: it leaves last


def _work(member: Member, place: Place) -> JSON:
    name = f"{place.engine_id} {tuple(place.rank)}"
    if place.role == "producer":
        producer = ProducerRank(member)
        producer.run()
        return {"role": "producer", "rank": name, "host": socket.gethostname(), "ended": producer.ended}
    consumer = ConsumerRank(member)
    consumer.run()
    restart = member.scenario.failures.restart
    report = rank_report(name, socket.gethostname(), consumer.outcomes, member.engine.stats(), restart=restart)
    return {**report, "role": "consumer", "outcomes": [dataclasses.asdict(each) for each in consumer.outcomes]}


def _gather(scenario: Scenario, seat: Seat, exchange: Exchange) -> JSON:
    reports: list[dict[str, Any]] = [exchange.get(f"report/{n}", START_S) for n in range(seat.world)]
    consumers = [report for report in reports if report["role"] == "consumer"]
    outcomes = {report["rank"]: [Outcome(**each) for each in report.pop("outcomes")] for report in consumers}
    total = total_report(scenario, consumers, outcomes)
    compared = rivals.table(scenario, [report.pop("rivals") for report in reports])
    nics = {f"{report['host']} {name}": counts for report in reports for name, counts in report.get("nics", {}).items()}
    producers = [report for report in reports if report["role"] == "producer"]
    return whole_report(
        scenario,
        total,
        consumers,
        {"producers": producers, "rivals": compared, "nics": nics, "samples": _samples(outcomes)},
    )


def _samples(outcomes: dict[str, list[Outcome]]) -> JSON:
    """Give what plots need: the time of each pull, in milliseconds."""
    done = [each for many in outcomes.values() for each in many if each.result == "done"]
    return {"pull_ms": [round((each.ended_s - each.began_s) * 1e3, 4) for each in done]}


def failure_of(report: JSON) -> KVRDMAError | None:
    """Give what was wrong, if anything."""
    from kvrdma.errors import DataError, PullError

    total = report["total"]
    if total["wrong_rows"]:
        return DataError(f"{total['wrong_rows']} rows hold bytes that are not their request's")
    if total["unexpected"]:
        return PullError("\n".join(["pulls failed that should not have:", *total["unexpected"]]))
    missing = report["scenario"]["requests"] - total["requests"]
    return PullError(f"{missing} requests were never pulled") if missing else None
