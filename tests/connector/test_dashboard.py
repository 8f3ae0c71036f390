"""The dashboard asks for metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("torch")]


def test_every_query_names_a_metric_and_every_metric_is_shown() -> None:
    from kvrdma.connector.prometheus import _COUNTERS, _GAUGES, _HISTOGRAMS

    exist = {f"{name}_{part}" for name, *_ in _HISTOGRAMS.values() for part in ("bucket", "sum", "count")}
    exist |= {f"{name}_total" for name, _ in _COUNTERS.values()} | {name for name, _ in _GAUGES.values()}
    exist.add("pull_failures_total")
    text = (Path(__file__).parents[2] / "examples/grafana_kvrdma.json").read_text()
    queries = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"vllm:kvrdma_(\w+)", query)}
    assert asked <= exist
    assert {name for name, _ in _GAUGES.values()} <= asked
    assert len(queries) == 17
