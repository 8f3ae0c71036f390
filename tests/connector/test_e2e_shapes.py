"""Two vLLM engines that differ in parallel or block sizes, or have another connector beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.connector.test_e2e_pd import LENGTHS, engine, nothing_left, same, transfer
from tests.helpers.pd import prompt_of
from tests.helpers.vllm_engine import EngineProcess

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("cma"), pytest.mark.slow, pytest.mark.timeout(900)]

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blocks-32-to-64": ({}, {"block_size": 64}),
    "blocks-64-to-32": ({"block_size": 64}, {}),
    "tp-1-to-2": ({}, {"tensor_parallel_size": 2}),
    "tp-2-to-1": ({"tensor_parallel_size": 2}, {}),
    "tp-1-to-2-blocks-64-to-32-chunked": (
        {"block_size": 64, "max_num_batched_tokens": 128},
        {"tensor_parallel_size": 2},
    ),
}


def check(p: EngineProcess, d: EngineProcess) -> None:
    """Every length through both, which are closed."""
    try:
        p.wait_ready(), d.wait_ready()
        for length in LENGTHS:
            prompt = prompt_of(length)
            same(transfer(p, d, str(length), prompt), p.generate(f"alone{length}", prompt))
        assert d.call("seen")["external_tokens"] == sum(LENGTHS) - len(LENGTHS)
        nothing_left(p, d)
    finally:
        d.close()
        p.close()


@pytest.mark.parametrize("name", SHAPES)
def test_answers_equal_those_of_one_engine(tiny_llama: str, name: str) -> None:
    theirs, ours = SHAPES[name]
    check(engine(tiny_llama, "kv_producer", **theirs), engine(tiny_llama, "kv_consumer", **ours))


def beside_another(role: str, folder: Path) -> dict[str, Any]:
    ours = {"kv_connector": "KvRdmaConnector", "kv_connector_module_path": "kvrdma.connector", "kv_role": role}
    disk = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    disk["kv_connector_extra_config"] = {"shared_storage_path": str(folder)}  # type: ignore[assignment]
    return {
        "kv_role": role,
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {"connectors": [ours, disk]},
    }


def test_beside_another_connector(tiny_llama: str, tmp_path: Path) -> None:
    check(
        *[
            engine(tiny_llama, role, transfer=beside_another(role, tmp_path / role))
            for role in ("kv_producer", "kv_consumer")
        ]
    )
