"""Layouts of engines that do not exist: sizes in, the layout their ranks would register out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvrdma.errors import LayoutError
from kvrdma.layout import KVLayout, TokenShare
from kvrdma.page_format import Kind, LayerSpec, TensorView
from kvrdma.topology import EngineShape, RankId

SketchFormat = Literal["HND", "NHD", "HND-outer", "NHD-outer", "CPU"]

_ORDERS = {"HND": "LBHNC", "NHD": "LBNHC", "HND-outer": "BLHNC", "NHD-outer": "BLNHC", "CPU": "LBHNC"}


@dataclass(frozen=True, slots=True)
class CacheSketch:
    """How an engine would store its cache; the same on every rank.

    Attributes:
        format: order of heads and tokens in a page; ``-outer`` puts all layers of a block together.
        block_size: tokens of a block on one rank.
        num_blocks: blocks of each rank.
        layers: layer names, for engines without pipeline stages.
        content: elements per head and token, keys and values together.
        itemsize: bytes of an element.
    """

    format: SketchFormat
    block_size: int
    num_blocks: int
    layers: tuple[str, ...]
    content: int
    itemsize: int


def sketch_layout(shape: EngineShape, rank: RankId, cache: CacheSketch, base: int = 0) -> KVLayout:
    """Lay out one rank's cache in one region at ``base``.

    Raises:
        LayoutError: sizes below 1, or an odd number of elements in the cpu format.
    """
    layers = shape.stages[rank.pp_rank] if shape.stages else cache.layers
    lo, hi = shape.heads(rank.rank)
    size = {"L": len(layers), "B": cache.num_blocks, "H": hi - lo, "N": cache.block_size, "C": cache.content}
    if min(size.values()) < 1 or cache.itemsize < 1:
        raise LayoutError(f"sizes must be at least 1, got {cache}")
    order = _ORDERS[cache.format]
    step = {axis: math.prod(size[inner] for inner in order[i + 1 :]) * cache.itemsize for i, axis in enumerate(order)}
    nbytes = math.prod(size.values()) * cache.itemsize
    shape_of, strides = (tuple(of[axis] for axis in "BHNC") for of in (size, step))
    views = {
        name: TensorView(base + i * step["L"], shape_of, strides, cache.itemsize, "cache", base, nbytes)
        for i, name in enumerate(layers)
    }
    kind: Kind = "mla" if shape.is_mla else "cpu" if cache.format == "CPU" else "attention"
    spec = LayerSpec((lo, hi), shape.total_heads, cache.block_size, kind, "BHNC")
    tokens = TokenShare(shape.dcp_rank(rank.rank), shape.dcp_size, shape.interleave)
    return KVLayout.from_tensors(views, spec, tokens)
