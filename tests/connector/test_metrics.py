"""From an observation on a rank to the log line and to Prometheus, through vLLM's own classes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.pd import decode, prompt_of, shape

if TYPE_CHECKING:
    from tests.helpers.mini_engine import MiniEngine

    Make = Callable[..., MiniEngine]

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("torch")]


def make_stats(**gauges: int) -> Any:  # noqa: ANN401
    from kvrdma.connector.metrics import KvRdmaStats

    stats = KvRdmaStats()
    for rank, value in gauges.items():
        stats.gauge("leases", rank, value)
    return stats


def test_joining_adds_counts_and_keeps_the_latest_gauge_of_each_rank() -> None:
    one, two, later = make_stats(r0=3), make_stats(r1=2), make_stats(r0=1)
    one.pulled(0.25, 0.125, 1 << 20, 10)
    two.pulled(0.75, 0.125, 3 << 20, 30)
    two.failed("p|q", "PullTimeoutError")
    later.failed("p|q", "PullTimeoutError")
    later.count("fence_rejections", 2)
    joined = one.aggregate(two).aggregate(later)
    assert joined.total("leases") == 3
    assert joined.reduce() == {
        "pulls": 2,
        "failed pulls": 2,
        "mean pull (ms)": 500.0,
        "p90 pull (ms)": 750.0,
        "MiB per pull": 2.0,
        "read MiB/s": 16.0,
        "rows per pull": 20.0,
        "fence rejections": 2,
        "leases": 3,
    }


def test_nothing_to_tell() -> None:
    stats = make_stats()
    stats.count("fence_rejections", 0)
    assert stats.is_empty()
    assert stats.reduce() == {"pulls": 0, "failed pulls": 0}
    assert not make_stats(r0=0).is_empty()  # back to 0 is news


def test_prometheus_shows_what_ranks_observed() -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from kvrdma.connector import KvRdmaConnector

    name = f"m{random.randrange(1 << 40)}"
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    metrics: Any = KvRdmaConnector.build_prom_metrics(
        _FakeConfig(), types, ["model_name", "engine"], {0: [name, "0"], 1: [name, "1"]}
    )
    stats = make_stats(r0=3, r1=2)
    stats.pulled(0.3, 0.2, 5000, 7)
    stats.failed("10.0.0.1|x", "PeerLostError")
    stats.count("publications_expired", 4)
    metrics.observe(json.loads(json.dumps(stats.to_dict())), 1)
    metrics.observe(json.loads(json.dumps(make_stats(r0=1).to_dict())), 1)
    labels = {"model_name": name, "engine": "1"}
    read = REGISTRY.get_sample_value
    assert read("vllm:kvrdma_leases_held", labels) == 3  # 1 of r0, 2 of r1
    assert read("vllm:kvrdma_leases_expired_total", labels) == 4
    assert read("vllm:kvrdma_pull_seconds_bucket", labels | {"le": "0.25"}) == 0
    assert read("vllm:kvrdma_pull_seconds_bucket", labels | {"le": "0.5"}) == 1
    assert read("vllm:kvrdma_pull_bytes_sum", labels) == 5000
    assert read("vllm:kvrdma_rows_posted_sum", labels) == 7
    failed = labels | {"peer": "10.0.0.1|x", "reason": "PeerLostError"}
    assert read("vllm:kvrdma_pull_failures_total", failed) == 1
    assert read("vllm:kvrdma_pull_seconds_count", labels | {"engine": "0"}) == 0
    ours = {each.name for each in REGISTRY.collect() if any(s.labels.get("model_name") == name for s in each.samples)}
    assert "vllm:kvrdma_leases_held" in ours
    assert [each for each in ours if not each.startswith("vllm:kvrdma_")] == []


def tell(engine: MiniEngine, told: list[dict[str, Any]]) -> None:
    """Keep what the scheduler would send to the API server."""
    make = engine.scheduler.make_stats

    def keep(*arguments: object, **named: object) -> Any:  # noqa: ANN401
        stats = make(*arguments, **named)
        told.append(stats.kv_connector_stats)
        return stats

    engine.scheduler.make_stats = keep


class _FakeConfig:
    kv_transfer_config = None


def test_an_engine_reports_what_happened(engines: Make) -> None:
    from kvrdma.connector import KvRdmaConnector
    from tests.helpers.mini_engine import settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer", shape(tp=2))
    told: list[dict[str, Any]] = []
    for engine in (p, d):
        tell(engine, told)
    decode(p, d, prompt_of(33))
    settle(p, d)
    total = KvRdmaConnector.build_kv_connector_stats()
    for data in told:
        if data:
            total.aggregate(KvRdmaConnector.build_kv_connector_stats(json.loads(json.dumps(data))))
    assert total.data["series"]["pull_bytes"] == [32 * 1024] * 2  # half of the heads on each rank
    assert total.data["counts"] == {"requests_loaded": 1, "tokens_loaded": 32, "publications_done": 1}
    assert total.data["gauges"] == {"leases": {"0/0": 0}, "breakers_open": {"scheduler": 0}}
    assert total.data["failures"] == {}


def test_a_request_without_params_is_told_of_once_and_gives_the_ranks_nothing_to_do(engines: Make) -> None:
    from tests.helpers.mini_engine import run

    d = engines("d", "kv_consumer")
    told: list[dict[str, Any]] = []
    tell(d, told)
    handed: list[Any] = []
    schedule = d.scheduler.schedule

    def keep() -> Any:  # noqa: ANN401
        out = schedule()
        handed.append(out.kv_connector_metadata)
        return out

    d.scheduler.schedule = keep
    d.add("d", prompt_of(33), None, new=4)
    run(d, until=lambda: "d" in d.finished)
    assert [data["counts"] for data in told if data] == [{"requests_without_params": 1}]
    assert len(handed) == 4
    assert not any(handed)
    assert len({id(each) for each in handed}) == 1  # none is made for a step that brings no work
