"""What a store counts, and how Prometheus hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvrdma.errors import ConfigError
from kvrdma.sidechannel import Endpoint

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import Metric


@dataclass(slots=True)
class Numbers:
    """Counts since the start; blocks unless they say otherwise."""

    lookups: int = 0
    """Messages."""
    looked_up: int = 0
    hits: int = 0
    offers: int = 0
    """Messages."""
    declined: int = 0
    """Offers that were turned away: nothing missing, no room, or too many at once."""
    filled: int = 0
    """Shares of a rank that arrived."""
    filled_bytes: int = 0
    fills_failed: int = 0
    """Offers whose bytes did not arrive whole."""
    evicted: int = 0
    refused: int = 0
    """Lookups that found every lease taken."""


DESCRIPTIONS: Mapping[str, str] = {
    "lookups": "Lookups answered.",
    "looked_up": "Blocks asked for by lookups.",
    "hits": "Blocks handed to readers.",
    "offers": "Offers received.",
    "declined": "Offers turned away: nothing missing, no room, or too many at once.",
    "filled": "Shares of blocks read from senders.",
    "filled_bytes": "Bytes read from senders.",
    "fills_failed": "Offers whose bytes did not arrive whole.",
    "evicted": "Blocks given up for others.",
    "refused": "Lookups that found every lease taken.",
    "cpu_seconds": "CPU time of the store's process.",
    "uptime_seconds": "Time since the start.",
    "malformed": "Control frames that were no message.",
    "rejected": "Clients turned away for want of the secret.",
}
_GAUGES: Mapping[str, str] = {
    "capacity_bytes": "Memory for blocks.",
    "used_bytes": "Memory that blocks take.",
    "blocks": "Blocks that can be read.",
    "families": "Kinds of caches: models, splits and block sizes.",
    "held": "Lookups whose blocks are being read.",
    "filling": "Offers being read.",
    "queued": "Offers waiting.",
}


class Source(Protocol):
    """What metrics are made of."""

    def stats(self) -> Mapping[str, float]:
        """Give all numbers."""
        ...


class Exporter:
    """Serves a store's numbers to Prometheus over HTTP, from a thread of its own."""

    def __init__(self, source: Source, bind: Endpoint) -> None:
        """Listen.

        Raises:
            ConfigError: prometheus_client is not installed, or the endpoint cannot be bound.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ConfigError(
                f"metrics need the package prometheus_client: pip install 'kvrdma[store]' ({error})"
            ) from None
        registry = CollectorRegistry()
        registry.register(_Collector(source.stats))
        try:
            started: tuple[WSGIServer, Thread] = start_http_server(bind.port, addr=bind.host, registry=registry)
        except (OSError, UnicodeError) as error:  # the latter: a host that no resolver takes
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"metrics cannot be served at {bind}: {why}; choose another port or host") from error
        self._server, self._thread = started
        self.endpoint = Endpoint(bind.host, int(self._server.server_address[1]))

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class _Collector:
    """Makes metrics when they are asked for."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Any]:
        """Name nothing beforehand."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Give every number as a counter or a gauge."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        numbers = self._stats()
        for name, text in DESCRIPTIONS.items():
            if name in numbers:
                yield CounterMetricFamily(f"kvrdma_store_{name}", text, numbers[name])
        for name, text in _GAUGES.items():
            if name in numbers:
                yield GaugeMetricFamily(f"kvrdma_store_{name}", text, numbers[name])
