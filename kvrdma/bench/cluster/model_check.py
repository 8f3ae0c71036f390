"""`python -m kvrdma.bench.cluster.model_check`: the times of ``--simulate`` beside those of a real run.

Measures a link (`kvrdma link-test`), runs a producer and a consumer over it (`kvrdma bench`, two processes of this
host), gives the measured latency, bandwidth and cost per row to the model, and prints both times of a pull and their
ratio, one JSON object per case.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from kvrdma.bench.cluster.scenario import make_scenario
from kvrdma.bench.cluster.simulate import Links, Model, play
from kvrdma.bench.reading import best_transport

_LINK = ("--nbytes", "64MiB", "--block", "4KiB,1MiB", "--pattern", "fragmented", "--iters", "9", "--latency", "64")
_STEP_S = 300.0
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pages of 32 KiB, one at a time", {"block": 16, "tokens": 1024, "concurrency": 1}),
    ("pages of 4 KiB, one at a time", {"block": 2, "tokens": 512, "concurrency": 1}),
    ("pages of 32 KiB, four at a time", {"block": 16, "tokens": 1024, "concurrency": 4}),
)
_MODEL = {"layers": 32, "kv_heads": 4, "head_dim": 128}  # 2 KiB a token and layer


def links_of(report: dict[str, Any]) -> Links:
    """Give what a report of link-test says a link can do.

    A read of large blocks gives the bandwidth, one of many small ones the cost of a row, and a small read takes two
    latencies.
    """
    cases = sorted(report["cases"], key=lambda case: int(case["block_bytes"]))
    small, large = cases[0], cases[-1]
    latency_s = report["latency"]["percentiles_us"]["50"] * 1e-6 / 2
    return Links(
        latency_s=latency_s,
        bytes_per_s=large["nbytes"] / (large["total_ms"]["median"] * 1e-3),
        row_s=small["total_ms"]["median"] * 1e-3 / small["rows"],
    )


def scenario_values(transport: str, case: dict[str, Any]) -> dict[str, Any]:
    """Give the scenario of a case; bytes are not verified, which would take the reader's time."""
    group = {"block": case["block"]}
    return {
        "model": _MODEL,
        "producer": group,
        "consumer": group,
        "requests": 40,
        "prompt": {"tokens": case["tokens"]},
        "arrival": {"concurrency": case["concurrency"]},
        "transports": [transport],
        "verify": False,
    }


def measured_ms(transport: str, case: dict[str, Any]) -> float:
    """Run a case for real; gives the median time of a pull."""
    words = [f"--set={key}={json.dumps(value)}" for key, value in scenario_values(transport, case).items()]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "kvrdma.bench", *words, "--json"],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    report = json.loads(ranks[0].communicate(timeout=_STEP_S)[0])
    ranks[1].communicate(timeout=_STEP_S)
    return float(report["ranks"][0]["pull_ms"]["p50"])


def modelled_ms(transport: str, case: dict[str, Any], links: Links) -> float:
    """Give the median time of a pull in the model."""
    traffic = play(Model(make_scenario(scenario_values(transport, case), "of a check")), links)
    return statistics.median(traffic.seconds) * 1e3


def results(transport: str) -> Iterator[dict[str, Any]]:
    """Measure the link anew before each case: a machine's speed changes."""
    for name, case in CASES:
        words = [sys.executable, "-m", "kvrdma", "link-test", "--transport", transport, *_LINK, "--json"]
        measured = subprocess.run(words, check=True, capture_output=True, text=True, timeout=_STEP_S)
        links = links_of(json.loads(measured.stdout))
        real, model = measured_ms(transport, case), modelled_ms(transport, case, links)
        yield {
            "bench": "model_check",
            "case": name,
            "transport": transport,
            "latency_us": round(links.latency_s * 1e6, 2),
            "gb_per_s": round(links.bytes_per_s / 1e9, 3),
            "row_ns": round(links.row_s * 1e9, 1),
            "pull_ms": round(real, 3),
            "modelled_ms": round(model, 3),
            "ratio": round(model / real, 3),
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Parse options and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="", help="the first installed one that reaches other processes")
    options = parser.parse_args(argv)
    for result in results(options.transport or best_transport()):
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
