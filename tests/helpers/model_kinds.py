"""The kinds of KV that vLLM's CPU engine can serve, as tiny models and engine arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.tiny_models import HYBRID, SLIDING, WINDOW, write_deepseek, write_llama

FULL, SLIDES, LATENT = "FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec"


class Kind(NamedTuple):
    """A model, and what both engines need to serve it."""

    write: Callable[[Path], Path]
    arguments: dict[str, Any]
    groups: list[str]
    """vLLM's spec of each KV group."""
    layers: dict[str, int]
    """How many layers there are of each spec."""
    token_bytes: int
    """In one layer, all heads."""

    def nbytes(self, tokens: int, block_size: int) -> int:
        """What the first ``tokens`` positions take: of a window only the last, from the beginning of a block."""
        seen = tokens - max(0, tokens - WINDOW + 1) // block_size * block_size
        return sum(n * self.token_bytes * (seen if spec == SLIDES else tokens) for spec, n in self.layers.items())


_HEADS = 4 * 2 * 32 * 4
"""Heads, keys and values, head size, float32."""

KINDS = {
    "window": Kind(partial(write_llama, **SLIDING), {}, [SLIDES], {SLIDES: 3}, _HEADS),
    "hybrid": Kind(
        partial(write_llama, **HYBRID), {"num_gpu_blocks_override": 128}, [SLIDES, FULL], {SLIDES: 2, FULL: 2}, _HEADS
    ),
    "mla": Kind(
        write_deepseek,
        # The backend that every CPU has; it takes blocks of 16 only, one prompt a step and no prefix cache.
        {"attention_backend": "CPU_MLA", "block_size": 16, "num_gpu_blocks_override": 128},
        [LATENT],
        {LATENT: 3},
        576 * 4,
    ),
    "mla-amx": Kind(write_deepseek, {"dtype": "bfloat16"}, [LATENT], {LATENT: 3}, 576 * 2),
}
