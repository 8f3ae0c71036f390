"""Two vLLM engines that differ in parallel or block sizes, or have another connector beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.connector.test_e2e_pd import LENGTHS, engine, nothing_left, same, transfer
from tests.helpers.pd import prompt_of
from tests.helpers.vllm_engine import EngineProcess

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("cma"), pytest.mark.slow, pytest.mark.timeout(900)]

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp-2-to-1-blocks-32-to-64": ({"tensor_parallel_size": 2}, {"block_size": 64}),
    "tp-1-to-2-blocks-64-to-32-chunked": (
        {"block_size": 64, "max_num_batched_tokens": 128},
        {"tensor_parallel_size": 2},
    ),
}
"""Every difference once, in as few pairs of engines as possible."""
ONE_BY_ONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blocks-32-to-64": ({}, {"block_size": 64}),
    "blocks-64-to-32": ({"block_size": 64}, {}),
    "tp-1-to-2": ({}, {"tensor_parallel_size": 2}),
    "tp-2-to-1": ({"tensor_parallel_size": 2}, {}),
}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "window-blocks-64-to-32": ("window", {"block_size": 64}, {}),
    "hybrid-to-blocks-of-64": ("hybrid", {}, {"block_size": 64}),
    "hybrid-tp-1-to-2-chunked": ("hybrid", {"max_num_batched_tokens": 128}, {"tensor_parallel_size": 2}),
    "mla-tp-1-to-2": ("mla", {}, {"tensor_parallel_size": 2}),
    "mla-amx-to-blocks-of-64": ("mla-amx", {}, {"block_size": 64}),
}


def check(p: EngineProcess, d: EngineProcess, lengths: Sequence[int] = LENGTHS) -> None:
    """Every length through both, which are closed.

    A prompt ends with a token that the producer has chosen itself: it computes it as a decoder does, too.
    """
    try:
        p.wait_ready(), d.wait_ready()
        for length in lengths:
            prompt = prompt_of(length)
            alone = p.generate(f"alone{length}", prompt, max_tokens=7)
            chosen, alone = alone.tokens[0], replace(alone, tokens=alone.tokens[1:], logprobs=alone.logprobs[1:])
            same(transfer(p, d, str(length), [*prompt, chosen]), alone)
        assert d.call("seen")["external_tokens"] == sum(lengths)
        nothing_left(p, d)
    finally:
        d.close()
        p.close()


@pytest.mark.parametrize("name", [*SHAPES, *(pytest.param(name, marks=pytest.mark.full) for name in ONE_BY_ONE)])
def test_answers_equal_those_of_one_engine(tiny_llama: str, name: str) -> None:
    theirs, ours = (SHAPES | ONE_BY_ONE)[name]
    check(engine(tiny_llama, "kv_producer", **theirs), engine(tiny_llama, "kv_consumer", **ours))


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs("amx")) if "amx" in name else name for name in KINDS]
)
def test_kinds_of_kv_between_shapes(tiny_model: Callable[[str], str], name: str) -> None:
    from tests.helpers.model_kinds import KINDS as MODELS

    kind, theirs, ours = KINDS[name]
    common = MODELS[kind].arguments
    check(
        engine(tiny_model(kind), "kv_producer", **(common | theirs)),
        engine(tiny_model(kind), "kv_consumer", **(common | ours)),
    )


BESIDE_ANOTHER = (1, 31, 32, 33, 66, 500)
"""As ``LENGTHS``, but 66 for 64: vLLM's ExampleConnector rounds a length down twice when it looks and once when it
loads, so that a prompt of 65 tokens after its own first 33 ends that engine (a file of 64 tokens is not there)."""


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


@pytest.mark.full
def test_beside_another_connector(tiny_llama: str, tmp_path: Path) -> None:
    p, d = (
        engine(tiny_llama, role, transfer=beside_another(role, tmp_path / role))
        for role in ("kv_producer", "kv_consumer")
    )
    check(p, d, BESIDE_ANOTHER)
