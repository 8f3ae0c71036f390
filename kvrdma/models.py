"""KV cache shapes of common models: how many bytes a token takes on a rank.

From the models' published configurations. Sliding-window layers are counted as full ones (gpt-oss has 18 of
36), so a figure for such a model is what a cache without that saving would move.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvrdma.errors import ConfigError, TopologyError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV cache of one model.

    ``kv_heads`` heads of ``head_dim`` elements, keys and values each; or for MLA one latent of ``head_dim``
    elements per token, replicated on every rank.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    mla: bool = False

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim) < 1:
            raise ConfigError(
                f"layers {self.layers}, kv heads {self.kv_heads}, head dim {self.head_dim}: must be 1 or more"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown: use {', '.join(DTYPE_BYTES)}")

    def heads_per_rank(self, tp: int) -> int:
        """KV heads of one of ``tp`` ranks; each head is replicated where ``tp`` exceeds them.

        Raises:
            TopologyError: neither of the two divides the other.
        """
        if tp < 1 or (not self.mla and self.kv_heads % tp and tp % self.kv_heads):
            raise TopologyError(f"tp {tp} and {self.kv_heads} kv heads: one must be a multiple of the other")
        return 1 if self.mla else max(1, self.kv_heads // tp)

    def token_bytes(self, tp: int) -> int:
        """Bytes of one token in one layer on one rank."""
        parts = 1 if self.mla else 2
        return parts * self.heads_per_rank(tp) * self.head_dim * DTYPE_BYTES[self.dtype]

    def page_bytes(self, tp: int, block_tokens: int) -> int:
        """Bytes of one page: a block of ``block_tokens`` tokens in one layer, keys and values together."""
        return block_tokens * self.token_bytes(tp)


MODELS = {
    "llama-3.1-8b": KVShape(layers=32, kv_heads=8, head_dim=128),
    "llama-3.1-70b": KVShape(layers=80, kv_heads=8, head_dim=128),
    "qwen3-32b": KVShape(layers=64, kv_heads=8, head_dim=128),
    "qwen3-235b": KVShape(layers=94, kv_heads=4, head_dim=128),
    "gpt-oss-120b": KVShape(layers=36, kv_heads=8, head_dim=64),
    "deepseek-v3": KVShape(layers=61, kv_heads=1, head_dim=576, mla=True),
}


def stages(layers: int, pp: int) -> list[range]:
    """Share layers out to pipeline stages as vLLM does by default (``get_pp_indices``).

    What is left over goes to the stages before the last one, one layer each: the last has the output to compute.
    """
    each, left = divmod(layers, pp)
    bounds = [0, *itertools.accumulate(each + (0 < pp - 1 - stage <= left) for stage in range(pp))]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


def model_shape(name: str, otherwise: str = "give --layers --kv-heads --head-dim") -> KVShape:
    """Look a model up by name, in any case and with or without its maker's prefix.

    Args:
        name: of the model.
        otherwise: what to do about one that is not in the table.

    Raises:
        ConfigError: not in the table; lists it.
    """
    key = name.rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-a22b")
    if key not in MODELS:
        raise ConfigError(f"model {name!r} is not in the table ({', '.join(MODELS)}): {otherwise}")
    return MODELS[key]
