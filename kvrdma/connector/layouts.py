"""From vLLM's cache tensors and specs to kvrdma's: which bytes of which layer mean what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec

from kvrdma.connector.groups import transfer_group_ids
from kvrdma.errors import LayoutError
from kvrdma.page_format import Kind, LayerSpec
from kvrdma.topology import EngineShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_KEYS_TRANSPOSED = ("vec", "vec16")
"""Instruction sets for which vLLM's CPU attention keeps keys as [D, N] and values as [N, D] in each page."""


@dataclass(frozen=True, slots=True)
class Caches:
    """What of a rank's caches is exchanged."""

    tensors: dict[str, Any]
    specs: dict[str, LayerSpec]


def exchanged_caches(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, Any],
    shape: EngineShape,
    rank: int,
) -> Caches:
    """Describe the caches of one rank.

    Args:
        vllm_config: vLLM's, with its layers built.
        kv_cache_config: this rank's groups.
        kv_caches: layer name to tensor, as vLLM registers them; layers that share another's cache are left out.
        shape: the engine's.
        rank: within its pipeline stage.

    Raises:
        LayoutError: a layer's bytes are of a kind that this version cannot place; says which and why.
    """
    tensors: dict[str, Any] = {}
    specs: dict[str, LayerSpec] = {}
    layers = vllm_config.compilation_config.static_forward_context
    for number, group_id in enumerate(transfer_group_ids(kv_cache_config)):
        group = kv_cache_config.kv_cache_groups[group_id]
        for name in group.layer_names:
            layer = layers.get(name)
            if name not in kv_caches or getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            tensors[name] = kv_caches[name]
            specs[name] = layer_spec(name, spec, layer, (shape, rank, number))
    if not tensors:
        raise LayoutError(f"none of the caches {sorted(kv_caches)} belongs to a KV group that is transferred")
    return Caches(tensors, specs)


def layer_spec(name: str, spec: object, layer: object, where: tuple[EngineShape, int, int]) -> LayerSpec:
    """Translate one layer's spec.

    Args:
        name: for messages.
        spec: vLLM's, of this layer.
        layer: vLLM's layer; None where there is none (tests).
        where: engine, rank in its stage, number of the KV group.

    Raises:
        LayoutError: this version does not know what its bytes mean.
    """
    shape, rank, group = where
    if isinstance(spec, MambaSpec):
        return LayerSpec((rank, rank + 1), shape.num_ranks, 1, "state", group=group)
    if not isinstance(spec, AttentionSpec):
        raise LayoutError(f"layer {name}: caches of {type(spec).__name__} are not supported")
    if spec.tokens_per_state != 1:
        raise LayoutError(f"layer {name}: compressed caches ({spec.tokens_per_state} tokens per state) are unsupported")
    dtype = str(spec.dtype).removeprefix("torch.")
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return LayerSpec((0, 1), 1, spec.block_size, "mla", dtype=dtype, group=group)
    heads = shape.heads(rank)
    if spec.num_kv_heads != heads[1] - heads[0] or spec.num_heads != spec.num_kv_heads:
        raise LayoutError(
            f"layer {name}: {spec.num_kv_heads} kv heads in {spec.num_heads} slots on this rank, where the model's "
            f"{shape.total_heads} heads over {shape.parts} parts make {heads[1] - heads[0]}: layers with other heads "
            "than the model's are not supported"
        )
    kind: Kind = "cpu" if packs_for_cpu(name, spec, layer) else "attention"
    return LayerSpec(heads, shape.total_heads, spec.block_size, kind, dtype=dtype, group=group)


def packs_for_cpu(name: str, spec: AttentionSpec, layer: object) -> bool:
    """Whether vLLM's CPU attention packs this layer's pages, in the one way that is known here.

    Raises:
        LayoutError: it packs them in another way.
    """
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
    if backend is None or backend.get_name() != "CPU_ATTN":
        return False
    packing = cpu_packing(spec)
    if packing not in _KEYS_TRANSPOSED:
        raise LayoutError(
            f"layer {name}: vLLM's CPU attention packs its pages for {packing!r} here, and only "
            f"{' and '.join(_KEYS_TRANSPOSED)} are known: on a host with AMX, use --dtype float16 or float32"
        )
    return True


def cpu_packing(spec: AttentionSpec) -> str:
    """Name how the CPU attention of this host packs pages of such a layer."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in {"bfloat16", "float16", "float32"}:
        return dtype
    return str(_get_attn_isa(spec.dtype, spec.block_size, spec.head_size))
