"""The built-in KV shapes against the published table of bytes per token and rows per request."""

from __future__ import annotations

import pytest

from kvrdma.errors import ConfigError, TopologyError
from kvrdma.models import MODELS, KVShape, model_shape, stages

TABLE = [  # model, tp, bytes per token and rank, MiB of 8192 tokens, rows of a page each (blocks of 16 tokens)
    ("llama-3.1-8b", 1, 131072, 1024, 16384),
    ("llama-3.1-8b", 2, 65536, 512, 16384),
    ("llama-3.1-8b", 4, 32768, 256, 16384),
    ("llama-3.1-70b", 4, 81920, 640, 40960),
    ("llama-3.1-70b", 8, 40960, 320, 40960),
    ("qwen3-32b", 4, 65536, 512, 32768),
    ("qwen3-32b", 8, 32768, 256, 32768),
    ("qwen3-235b", 4, 48128, 376, 48128),
    ("qwen3-235b", 8, 48128, 376, 48128),
    ("gpt-oss-120b", 1, 73728, 576, 18432),
    ("gpt-oss-120b", 4, 18432, 144, 18432),
    ("deepseek-v3", 1, 70272, 549, 31232),
    ("deepseek-v3", 8, 70272, 549, 31232),
]


@pytest.mark.parametrize(("name", "tp", "token_bytes", "mib", "rows"), TABLE)
def test_bytes_and_rows_are_those_of_the_table(name: str, tp: int, token_bytes: int, mib: int, rows: int) -> None:
    shape = model_shape(name)
    assert shape.layers * shape.token_bytes(tp) == token_bytes
    assert shape.layers * shape.token_bytes(tp) * 8192 == mib << 20
    assert shape.layers * (8192 // 16) == rows
    assert rows * shape.page_bytes(tp, 16) == mib << 20


def test_heads_are_replicated_where_ranks_exceed_them() -> None:
    four_heads = KVShape(layers=1, kv_heads=4, head_dim=128)
    assert [four_heads.heads_per_rank(tp) for tp in (1, 2, 4, 8, 16)] == [4, 2, 1, 1, 1]


def test_fp8_halves_the_bytes() -> None:
    assert KVShape(1, 8, 128, dtype="fp8").token_bytes(1) * 2 == KVShape(1, 8, 128).token_bytes(1) == 4096


def test_a_size_that_does_not_fit_the_heads_is_refused() -> None:
    with pytest.raises(TopologyError, match="tp 3 and 8 kv heads"):
        model_shape("llama-3.1-8b").token_bytes(3)


@pytest.mark.parametrize(
    "name", ["Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-235B-A22B", "openai/gpt-oss-120b"]
)
def test_names_are_found_as_people_write_them(name: str) -> None:
    assert model_shape(name) in MODELS.values()


def test_an_unknown_model_and_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model .gpt-2. is not in the table .llama-3\.1-8b"):
        model_shape("gpt-2")
    with pytest.raises(ConfigError, match="layers 0"):
        KVShape(layers=0, kv_heads=1, head_dim=1)
    with pytest.raises(ConfigError, match="'int3' is unknown"):
        KVShape(1, 1, 1, dtype="int3")


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (9, 4, [2, 2, 3, 2]),
        (5, 2, [3, 2]),
        (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]),
        (3, 1, [3]),
        (2, 2, [1, 1]),
    ],
)
def test_layers_of_pipeline_stages(layers: int, pp: int, sizes: list[int]) -> None:
    """As vLLM shares them out by default; `tests/connector/test_topology_vs_vllm.py` asks it."""
    assert [len(part) for part in stages(layers, pp)] == sizes
    assert [layer for part in stages(layers, pp) for layer in part] == list(range(layers))
