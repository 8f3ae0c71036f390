"""What the connector counts, in the form in which vLLM carries it from the ranks to its log and to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

SERIES = ("pull_s", "read_s", "pull_bytes", "rows_posted")
"""One value per pull and rank."""
GAUGES = ("leases", "quarantined", "oldest_lease_s")
"""Of an engine's stats."""
MOST = frozenset({"oldest_lease_s"})
"""Gauges whose total is the highest of any rank, not the sum."""


@dataclass(slots=True)
class Counts:
    """What the scheduler side counts, since the start."""

    requests_without_params: int = 0
    """On an engine that only consumes: it computes their prompts itself."""
    requests_malformed: int = 0
    """Params that cannot be read, or that belong to another prompt."""
    requests_declined: int = 0
    """Nothing to pull: the local cache had it, or the breaker of the producer was open."""
    requests_loaded: int = 0
    """Pulled by every rank: counted at the end, failed ones never."""
    tokens_loaded: int = 0
    """Of those."""
    requests_not_offered: int = 0
    """Finished prefills that found every lease taken."""


def joined(name: str, ranks: Mapping[str, int]) -> int:
    """Sum a gauge over ranks, or give the highest."""
    return max(ranks.values(), default=0) if name in MOST else sum(ranks.values())


@dataclass
class KvRdmaStats(KVConnectorStats):
    """An interval's observations: series per pull, counts, and the latest value of each gauge.

    ``data`` is JSON-able: ``{"series": {name: [values]}, "counts": {name: n}, "failures": {"peer|reason": n},
    "gauges": {name: {rank: value}}}``. Gauges keep one value per rank, so that joining intervals does not add
    up what is the same; their total is the sum over ranks, or the highest of them (``MOST``).
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {"series": {}, "counts": {}, "failures": {}, "gauges": {}}

    def pulled(self, pull_s: float, read_s: float, nbytes: int, rows: int) -> None:
        """Record a pull of one rank that succeeded."""
        for name, value in zip(SERIES, (pull_s, read_s, nbytes, rows), strict=True):
            self.data["series"].setdefault(name, []).append(value)

    def failed(self, peer: str, reason: str) -> None:
        """Record a pull of one rank that failed."""
        key = f"{peer}|{reason}"
        self.data["failures"][key] = self.data["failures"].get(key, 0) + 1

    def count(self, name: str, times: int = 1) -> None:
        """Add to a count."""
        if times:
            self.data["counts"][name] = self.data["counts"].get(name, 0) + times

    def gauge(self, name: str, rank: str, value: int) -> None:
        """Set a gauge of one rank."""
        self.data["gauges"].setdefault(name, {})[rank] = value

    def total(self, name: str) -> int:
        """Join a gauge of all ranks."""
        return joined(name, self.data["gauges"].get(name, {}))

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KvRdmaStats:
        """Join another rank's, or a later interval's, observations into these."""
        for name, values in other.data["series"].items():
            self.data["series"].setdefault(name, []).extend(values)
        for kind in ("counts", "failures"):
            for name, value in other.data[kind].items():
                self.data[kind][name] = self.data[kind].get(name, 0) + value
        for name, ranks in other.data["gauges"].items():
            self.data["gauges"].setdefault(name, {}).update(ranks)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Give the line that vLLM logs."""
        series = self.data["series"]
        number = len(series.get("pull_s", ()))
        line: dict[str, int | float] = {"pulls": number, "failed pulls": sum(self.data["failures"].values())}
        if number:
            seconds = sorted(series["pull_s"])
            mib = sum(series["pull_bytes"]) / 2**20
            line |= {
                "mean pull (ms)": round(1e3 * sum(seconds) / number, 3),
                "p90 pull (ms)": round(1e3 * seconds[min(number - 1, int(0.9 * number))], 3),
                "MiB per pull": round(mib / number, 3),
                "read MiB/s": round(mib / max(sum(series["read_s"]), 1e-9), 1),
                "rows per pull": round(sum(series["rows_posted"]) / number, 1),
            }
        line |= {name.replace("_", " "): count for name, count in sorted(self.data["counts"].items())}
        line |= {name.replace("_", " "): self.total(name) for name in sorted(self.data["gauges"])}
        return line
