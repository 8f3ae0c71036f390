"""How `kvrdma bench --simulate` talks: each number of the model with its unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LABELS = {
    "handshake_bytes_per_rank_and_peer": "handshake of one rank with one peer, bytes",
    "handshake_mb_per_rank_all_peers": "handshakes of one rank with all peers, MB",
    "handshakes_per_producer_all_consumers": "handshakes a producer answers for all consumers",
    "handshakes_seconds_of_one_producer": "time of one producer for those, s",
    "memory_kb_per_peer": "memory of a rank for one peer, kB",
    "memory_mb_per_rank_all_peers": "memory of a rank for all peers, MB",
    "reference_bytes": "reference to a request, bytes",
    "control_messages_per_s_and_producer_rank": "control messages to a producer rank, 1/s",
    "answers_per_s_of_one_thread": "answers of one thread, measured here, 1/s",
    "control_load": "control messages, share of what one thread can answer",
    "rows_posted": "rows posted (after merging)",
    "nbytes": "bytes read",
    "seconds": "all requests, s",
    "gb_per_s_and_consumer_rank": "each consumer rank, GB/s",
    "busiest_producer_link": "busiest producer link, share of the time",
    "request_ms": "a request, ms",
}


def lines_of(result: Mapping[str, Any]) -> Iterator[str]:
    """Give a line for each number of the model, kB, MB and GB being powers of 1000."""
    for key, value in result.items():
        label = _LABELS.get(key, key.replace("_", " "))
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {number:g}" for name, number in value.items())  # noqa: PLW2901
        yield f"{label}: {value}"
