"""Finishes received pages by one in-place transpose, on CUDA devices (CuPy) and in host memory."""

from __future__ import annotations

from kvrdma.blocks import clip_ssm_state_blocks
from kvrdma.reshape.dispatch import apply, apply_at
from kvrdma.reshape.pages import PagedMemory, paged
from kvrdma.reshape.receive import (
    copy_kv_blocks,
    cpu_key_reshape,
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_cpu_attention_on_receive,
)
from kvrdma.reshape.spec import Reshape

__all__ = [
    "PagedMemory",
    "Reshape",
    "apply",
    "apply_at",
    "clip_ssm_state_blocks",
    "copy_kv_blocks",
    "cpu_key_reshape",
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_cpu_attention_on_receive",
    "paged",
]
