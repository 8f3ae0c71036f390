"""Who this rank is: parallel sizes, and what both sides of a transfer must have in common."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import vllm

from kvrdma.errors import ConfigError
from kvrdma.handshake import Identity
from kvrdma.topology import EngineShape, RankId

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MAX_FIELD_CHARS = 256


def engine_shape(vllm_config: VllmConfig, stages: tuple[tuple[str, ...], ...] = ()) -> EngineShape:
    """Give the engine's shape.

    Args:
        vllm_config: vLLM's.
        stages: layers of each pipeline stage, where there is more than one and they are known.

    Raises:
        TopologyError: the sizes do not fit the model's kv heads.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    return EngineShape(
        tp_size=parallel.tensor_parallel_size,
        num_kv_heads=max(1, model.get_total_num_kv_heads()),
        dcp_size=parallel.decode_context_parallel_size,
        interleave=getattr(parallel, "cp_kv_cache_interleave_size", 1),
        is_mla=model.use_mla,
        stages=stages,
    )


def rank_identity(vllm_config: VllmConfig, rank: RankId, stages: tuple[tuple[str, ...], ...]) -> Identity:
    """Name one rank of this engine."""
    return Identity(
        engine_id=vllm_config.kv_transfer_config.engine_id,
        shape=engine_shape(vllm_config, stages),
        rank=rank,
        model=model_fields(vllm_config),
    )


def model_fields(vllm_config: VllmConfig) -> dict[str, str]:
    """Name what has to be equal for the bytes of one engine to mean the same in another.

    Layouts, block sizes and parallel sizes may differ and are not among these; dtypes and heads per layer are
    compared with the layouts. The attention backend counts only where it decides what quantised bytes mean.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    fields = {
        "model": model.model,
        "revision": str(model.revision),
        "weights dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv cache dtype": str(cache.cache_dtype),
        "kv heads": str(model.get_total_num_kv_heads()),
        "head size": str(model.get_head_size()),
        "layers": str(model.get_total_num_hidden_layers()),
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "draft": _draft(vllm_config),
    }
    return {name: _short(value) for name, value in fields.items()}


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuse, at start-up, what cannot work.

    Raises:
        ConfigError: says what, why, and what to do.
    """
    transfer, parallel, model = vllm_config.kv_transfer_config, vllm_config.parallel_config, vllm_config.model_config
    refusals = {
        "encoder-decoder models: their cross attention is not exchanged": model.is_encoder_decoder,
        "prefill context parallel: set prefill_context_parallel_size=1": (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1
        ),
        "enable_permute_local_kv: kvrdma converts layouts by itself, remove it": (
            getattr(transfer, "enable_permute_local_kv", False)
        ),
        f"kv_buffer_device={transfer.kv_buffer_device}: use cuda or cpu": (
            transfer.kv_buffer_device not in {"cuda", "cpu"}
        ),
    }
    for text, refused in refusals.items():
        if refused:
            raise ConfigError(f"KvRdmaConnector does not support {text}")
    engine_shape(vllm_config)


def stages_in_host_memory(vllm_config: VllmConfig) -> bool:
    """Whether KV goes through host memory: asked for, and the caches are elsewhere."""
    from vllm.platforms import current_platform

    return bool(current_platform.device_type != "cpu" and vllm_config.kv_transfer_config.kv_buffer_device == "cpu")


def _draft(vllm_config: VllmConfig) -> str:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return "none"
    return f"{speculative.method}: {speculative.draft_model_config.model}"


def _short(value: str) -> str:
    """Keep a field within what a message may hold."""
    if len(value) <= _MAX_FIELD_CHARS:
        return value
    return f"{value[:180]}... sha256 {hashlib.sha256(value.encode()).hexdigest()}"[:_MAX_FIELD_CHARS]
