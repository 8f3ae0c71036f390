"""Which attention backends and specs a vLLM engine uses, as far as KV transfer depends on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import AttentionSpec

from kvrdma.connector.groups import transfer_group_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheConfig


def get_current_attn_backends(
    vllm_config: VllmConfig, layer_names: Sequence[str] | None = None
) -> list[type[AttentionBackend]]:
    """List the distinct attention backends of the model's layers, in order of first use.

    Args:
        vllm_config: vLLM's.
        layer_names: only of these layers; of all by default.

    Returns:
        One class per full name; where no layer is built yet, the one that vLLM would choose for the model.
    """
    layers = vllm_config.compilation_config.static_forward_context
    names = layers if layer_names is None else layer_names
    found = [layers[name] for name in names if isinstance(layers.get(name), AttentionLayerBase)]
    if not found:
        return [_default_backend(vllm_config)]
    backends = [layer.get_attn_backend() for layer in found]
    return list({backend.full_cls_name(): backend for backend in backends}.values())


def get_current_attn_backend(
    vllm_config: VllmConfig, layer_names: Sequence[str] | None = None
) -> type[AttentionBackend]:
    """Give the first of them."""
    return get_current_attn_backends(vllm_config, layer_names)[0]


def get_current_attn_backends_and_specs(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, fallback: list[type[AttentionBackend]]
) -> tuple[list[type[AttentionBackend]], list[AttentionSpec | None]]:
    """List the distinct pairs of backend and spec of the layers that are transferred.

    Layers that keep one state for several tokens are left out; a spec that is not of attention counts as None.

    Returns:
        Backends, and the spec of each; ``fallback`` and Nones where there is no such layer.
    """
    pairs: dict[tuple[Any, Any], None] = {}
    for layer, spec in _transferred(vllm_config, kv_cache_config):
        if isinstance(spec, AttentionSpec):
            if spec.tokens_per_state <= 1:
                pairs[layer.get_attn_backend(), spec] = None
        else:
            pairs[layer.get_attn_backend(), None] = None
    if not pairs:
        return fallback, [None] * len(fallback)
    backends, specs = zip(*pairs, strict=True)
    return list(backends), list(specs)


def check_compressed_kernel_split(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kernel_block_size: int
) -> None:
    """Refuse compressed pages that would have to be split into kernel blocks.

    Raises:
        NotImplementedError: a layer keeps one state for several tokens, its block is a multiple of the kernel's, and
            each layer's blocks lie apart from the other layers'.
    """
    if vllm_config.cache_config.get_resolved_kv_cache_layout().is_block_outermost:
        return
    for group_id in transfer_group_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_id]
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {"": group.kv_cache_spec}
        for name, spec in specs.items():
            compressed = isinstance(spec, AttentionSpec) and spec.tokens_per_state > 1
            if compressed and spec.block_size != kernel_block_size and spec.block_size % kernel_block_size == 0:
                raise NotImplementedError(
                    f"layer {name or group.layer_names[0]} keeps {spec.tokens_per_state} tokens per state in blocks of "
                    f"{spec.block_size} tokens, which a layer-outermost layout cannot split into kernel blocks of "
                    f"{kernel_block_size}: use a block-outermost layout or block_size={kernel_block_size}"
                )


def kv_connector_may_load_foreign_kv(vllm_config: VllmConfig) -> bool:
    """Whether KV may come from another engine or layout than this one's, so that it has to be taken as it is."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return False
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    connector = KVConnectorFactory.get_connector_class(transfer)
    canonical = getattr(connector, "only_restores_canonical_kv", None)
    return canonical is None or not canonical(transfer)


def _transferred(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Iterator[tuple[Any, Any]]:
    """Walk the layers of transferred groups with their specs."""
    layers = vllm_config.compilation_config.static_forward_context
    for group_id in transfer_group_ids(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[group_id]
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            layer = layers.get(name)
            if isinstance(layer, AttentionLayerBase):
                yield layer, specs.get(name, group.kv_cache_spec)


def _default_backend(vllm_config: VllmConfig) -> type[AttentionBackend]:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = vllm_config.model_config
    with set_current_vllm_config(vllm_config):
        chosen: type[AttentionBackend] = get_attn_backend(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            use_mla=model.use_mla,
        )
    return chosen
