"""``vllm:kvrdma_*``: what of the connector Prometheus scrapes from vLLM's API server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvrdma.connector.metrics import joined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BYTES = tuple(float(1 << bits) for bits in range(12, 37, 2))
_ROWS = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
_HISTOGRAMS: Mapping[str, tuple[str, str, Sequence[float]]] = {
    "pull_s": ("pull_seconds", "Time from the order to pull to its end, per request and rank.", _SECONDS),
    "read_s": ("read_seconds", "Time from the first read posted to the fence, per request and rank.", _SECONDS),
    "pull_bytes": ("pull_bytes", "Bytes read, per request and rank.", _BYTES),
    "rows_posted": ("rows_posted", "Reads posted after joining neighbours, per request and rank.", _ROWS),
}
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "fence_rejections": ("fence_rejections", "Pulls refused because the lease had ended, all ranks."),
    "pulls_retried": ("pulls_retried", "Pulls tried again over a fresh connection, all ranks."),
    "publications_expired": ("leases_expired", "Leases that ended without their consumer, all ranks."),
    "publications_done": ("leases_done", "Leases whose consumers were done, all ranks."),
    "requests_without_params": ("requests_without_params", "Requests to a consumer that name no producer."),
    "requests_malformed": ("requests_malformed", "Requests whose params cannot be used."),
    "requests_declined": ("requests_declined", "Requests with a producer, from which nothing was pulled."),
    "requests_loaded": ("requests_loaded", "Requests whose prompt, or part of it, every rank has pulled."),
    "tokens_loaded": ("tokens_loaded", "Prompt tokens pulled instead of computed."),
    "requests_not_offered": ("requests_not_offered", "Finished requests that found every lease taken."),
}
_GAUGES: Mapping[str, tuple[str, str]] = {
    "leases": ("leases_held", "Leases held now, sum over ranks."),
    "quarantined": ("quarantined_pulls", "Pulls whose blocks a transport may still write to, sum over ranks."),
    "oldest_lease_s": ("oldest_lease_seconds", "Age of the oldest lease held now, the highest of any rank."),
    "breakers_open": ("breakers_open", "Producers that are left alone now."),
}


class KvRdmaPromMetrics(KVConnectorPromMetrics):
    """One set of metrics per engine of the API server."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register them."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms = {
            key: self._per_engine(
                self._histogram_cls(
                    name=f"vllm:kvrdma_{name}", documentation=text, buckets=buckets, labelnames=labelnames
                )
            )
            for key, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            key: self._per_engine(
                self._counter_cls(name=f"vllm:kvrdma_{name}", documentation=text, labelnames=labelnames)
            )
            for key, (name, text) in _COUNTERS.items()
        }
        self._gauges = {
            key: self._per_engine(
                self._gauge_cls(name=f"vllm:kvrdma_{name}", documentation=text, labelnames=labelnames)
            )
            for key, (name, text) in _GAUGES.items()
        }
        self._failures = self._counter_cls(
            name="vllm:kvrdma_pull_failures",
            documentation="Pulls that failed, by producer and reason, all ranks.",
            labelnames=[*labelnames, "peer", "reason"],
        )
        self._held: dict[tuple[int, str], dict[str, int]] = {}

    def _per_engine(self, metric: Any) -> dict[int, Any]:  # noqa: ANN401 - prometheus_client's, or Ray's
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in one interval of one engine."""
        for key, histogram in self._histograms.items():
            for value in transfer_stats_data["series"].get(key, ()):
                histogram[engine_idx].observe(value)
        for key, counter in self._counters.items():
            if times := transfer_stats_data["counts"].get(key, 0):
                counter[engine_idx].inc(times)
        for key, gauge in self._gauges.items():
            if ranks := transfer_stats_data["gauges"].get(key):
                held = self._held.setdefault((engine_idx, key), {})
                held.update(ranks)
                gauge[engine_idx].set(joined(key, held))
        labels = self.per_engine_labelvalues[engine_idx]
        for name, times in transfer_stats_data["failures"].items():
            peer, _, reason = name.rpartition("|")
            self._failures.labels(*labels, peer, reason).inc(times)
