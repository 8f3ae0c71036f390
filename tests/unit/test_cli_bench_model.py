"""What `kvrdma bench` prints has units, and the model's options need the model."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from kvrdma.bench.cluster.scenario import make_scenario
from kvrdma.bench.cluster.simulate import Links, simulate
from kvrdma.cli.bench import bench, show
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


def test_the_columns_of_a_run_have_units(capsys: pytest.CaptureFixture[str]) -> None:
    total = dict.fromkeys(("requests_done", "requests", "tokens", "nbytes", "busy_seconds", "gb_per_s", "rows",
                           "rows_posted", "fence_rejections"), 1)  # fmt: skip
    times = {"p50": 1.0, "p99": 2.0}
    parts = dict.fromkeys(("plan", "post", "wait", "reshape"), times)
    rank = {"rank": "consumer0 (0, 0)", "host": "h", "gb_per_s": 1.0, "pulls": 1, "pull_ms": times, "split_ms": parts,
            "results": {"done": 1}}  # fmt: skip
    show({"kind": "bench", "total": total, "ranks": [rank], "rivals": [], "nics": {}, "verified": True}, None,
         as_json=False)  # fmt: skip
    heading = capsys.readouterr().out.splitlines()[1].split()
    assert " ".join(heading) == "rank GB/s pulls p50 ms p99 ms plan ms post ms wait ms reshape ms results"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--engines", "5"), "--engines only with --simulate"),
        (("--engines", "1000"), "--engines only with --simulate"),
        (("--latency-us", "1", "--gb-per-s", "2", "--row-ns", "3"), "--latency-us --gb-per-s --row-ns only with --sim"),
    ],
)
def test_options_of_the_model_are_refused_without_it(words: tuple[str, ...], says: str) -> None:
    ended = CliRunner().invoke(bench, words)
    assert ended.exit_code == 2
    assert says in ended.stderr
    assert "RANK" not in ended.stderr
