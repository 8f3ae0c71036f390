"""Helpers on vLLM's real configs, compared with vLLM's own where it has them."""

# ruff: noqa: ANN401 - vLLM's objects are not type-checked with us

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("torch")]


@pytest.fixture
def config(tiny_llama: str) -> Iterator[Any]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.helpers.mini_engine import Shape, make_config

        yield make_config(tiny_llama, "e", "kv_both", Shape(), "fail", {})


def layer(backend: type) -> Any:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Layer(AttentionLayerBase):  # type: ignore[misc]
        def get_attn_backend(self) -> type:
            return backend

        def get_kv_cache_spec(self, *_: object) -> None:
            return None

    return Layer()


def backend(name: str) -> Any:
    return type(name, (), {"full_cls_name": classmethod(lambda cls: ("tests", cls.__name__))})


def attention(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(**{"block_size": 64, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32} | changes)


def groups(*specs: Any, hidden: tuple[int, ...] = ()) -> Any:
    """One layer per spec, named l0, l1, ...; those in ``hidden`` are not transferred."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    made = [
        KVCacheGroupSpec([f"l{number}"], spec, enable_kv_transfer=number not in hidden)
        for number, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=made)


def fill(config: Any, *backends: Any) -> None:
    context = config.compilation_config.static_forward_context
    context.update({f"l{number}": layer(each) for number, each in enumerate(backends)})


def test_backends_are_distinct_and_in_order(config: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector import utils

    from kvrdma.connector import get_current_attn_backend, get_current_attn_backends

    one, two = backend("One"), backend("Two")
    fill(config, one, two, one)
    config.compilation_config.static_forward_context["other"] = object()
    assert get_current_attn_backends(config) == [one, two] == utils.get_current_attn_backends(config)
    assert get_current_attn_backends(config, ["l1", "absent"]) == [two]
    assert get_current_attn_backend(config, ["l2"]) is one


def test_without_layers_it_is_the_one_vllm_would_choose(config: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector import utils

    from kvrdma.connector import get_current_attn_backends

    (chosen,) = get_current_attn_backends(config)
    assert chosen.get_name() == "CPU_ATTN"
    assert [chosen] == utils.get_current_attn_backends(config)
    assert get_current_attn_backends(config, ["absent"]) == [chosen]


def test_pairs_of_backend_and_spec(config: Any) -> None:
    import torch
    from vllm.distributed.kv_transfer.kv_connector import utils
    from vllm.v1.kv_cache_interface import MambaSpec

    from kvrdma.connector import get_current_attn_backends_and_specs

    one, two = backend("One"), backend("Two")
    state = MambaSpec(block_size=64, shapes=((4, 4),), dtypes=(torch.float32,))
    plain, other = attention(), attention(block_size=32)
    kv = groups(plain, plain, other, state, attention(block_size=16), hidden=(4,))
    fill(config, one, one, one, two, two)
    expected = ([one, one, two], [plain, other, None])
    assert get_current_attn_backends_and_specs(config, kv, [two]) == expected
    assert utils.get_current_attn_backends_and_specs(config, kv, [two]) == expected


def test_compressed_specs_are_skipped_and_the_fallback_is_used(config: Any) -> None:
    from kvrdma.connector import get_current_attn_backends_and_specs

    one, two = backend("One"), backend("Two")
    fill(config, one)
    assert get_current_attn_backends_and_specs(config, groups(attention(tokens_per_state=4)), [two, one]) == (
        [two, one],
        [None, None],
    )
    assert get_current_attn_backends_and_specs(config, groups(attention()), [two]) == ([one], [attention()])


@pytest.mark.parametrize(
    ("layout", "tokens_per_state", "kernel", "refused"),
    [
        ("LBHNC", 4, 32, True),
        ("LBHNC", 4, 64, False),  # the kernel's own size
        ("LBHNC", 4, 48, False),  # no multiple of it
        ("LBHNC", 1, 32, False),
        ("BLHNC", 4, 32, False),
    ],
)
def test_compressed_pages_cannot_be_split_where_layers_lie_apart(
    config: Any, layout: str, tokens_per_state: int, kernel: int, refused: bool
) -> None:
    from kvrdma.connector import check_compressed_kernel_split

    config.cache_config.kv_cache_layout = layout
    kv = groups(attention(), attention(tokens_per_state=tokens_per_state))
    if refused:
        with pytest.raises(NotImplementedError, match="l1 keeps 4 tokens per state in blocks of 64 tokens"):
            check_compressed_kernel_split(config, kv, kernel)
    else:
        check_compressed_kernel_split(config, kv, kernel)


def test_compressed_pages_of_groups_that_are_not_transferred_do_not_matter(config: Any) -> None:
    from kvrdma.connector import check_compressed_kernel_split

    config.cache_config.kv_cache_layout = "LBHNC"
    check_compressed_kernel_split(config, groups(attention(), attention(tokens_per_state=4), hidden=(1,)), 32)


def test_who_may_load_foreign_kv(config: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvrdma.connector import KvRdmaConnector, kv_connector_may_load_foreign_kv

    assert kv_connector_may_load_foreign_kv(config)
    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is KvRdmaConnector
    assert not kv_connector_may_load_foreign_kv(SimpleNamespace(kv_transfer_config=None))


def test_a_connector_that_restores_its_own_kv_does_not(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrdma.connector import KvRdmaConnector, kv_connector_may_load_foreign_kv

    seen: list[object] = []

    def canonical(transfer: object) -> bool:
        seen.append(transfer)
        return True

    monkeypatch.setattr(KvRdmaConnector, "only_restores_canonical_kv", canonical)
    assert not kv_connector_may_load_foreign_kv(config)
    assert seen == [config.kv_transfer_config]
