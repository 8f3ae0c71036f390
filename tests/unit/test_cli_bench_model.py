"""What `kvrdma bench --simulate` prints has units."""

from __future__ import annotations

from kvrdma.bench.cluster.scenario import make_scenario
from kvrdma.bench.cluster.simulate import Links, simulate
from kvrdma.cli.bench_model import _LABELS, lines_of


def test_every_number_is_labelled() -> None:
    small = make_scenario({"requests": 4, "prompt": {"tokens": 64}}, "test")
    result = simulate(small, 2, Links(5e-6, 50e9, 1e-7))["result"]
    assert set(_LABELS) <= set(result), "no label of a number that is not there"
    lines = list(lines_of(result))
    assert f"bytes read: {result['nbytes']}" in lines
    assert f"all requests, s: {result['seconds']}" in lines
    (request,) = [line for line in lines if line.startswith("a request, ms: ")]
    assert f"p50 {result['request_ms']['p50']:g}" in request
    counts = {"engines", "ranks", "requests", "rows", "heartbeats", "done_messages", "handshakes_made"}
    assert set(result) - set(_LABELS) == counts, "a number with a unit needs a label"
