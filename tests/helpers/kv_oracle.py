"""A slow, obvious model of two engines: numpy caches addressed by (layer, part, head, token).

Nothing here uses the planner's geometry. A format is a way to view a storage as ``[page, head, token, D]``
arrays, one per part, by numpy indexing alone; the place of a position is the rule of kvrdma.topology.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrdma.layout import KVLayout, TokenShare
from kvrdma.page_format import Kind, LayerSpec
from kvrdma.plan import PageReshape, ReadPlan
from kvrdma.topology import EngineShape, RankId

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

CONSUMER_POISON, PRODUCER_POISON = 0xA5, 0x5A
SLACK = 64

ATTENTION = ("HND", "NHD", "outer-HND", "outer-NHD", "head-outer", "2BNHC", "2BHNC", "B2NHC", "B2HNC")
PAIRS = ("pair-HND", "pair-NHD")
SPLITTABLE = ("HND", "NHD", "pair-HND", "pair-NHD", "2BNHC", "CPU", "MLA", "B2HNC")


@dataclass(frozen=True)
class Geometry:
    """Sizes of one rank's tensors."""

    layers: tuple[str, ...]
    pages: int
    heads: int
    tokens: int
    elems: int
    dtype: str


@dataclass(frozen=True)
class EngineModel:
    """One engine of a test: how it splits, how it stores, in blocks of how many tokens."""

    shape: EngineShape
    format: str
    block: int
    page: int
    blocks: int

    @property
    def per_block(self) -> int:
        return self.block // self.page


@dataclass
class RankCache:
    """One rank's storages, its tensors by layer, and views of its parts as ``[page, head, token, D]``."""

    engine: EngineModel
    rank: RankId
    layout: KVLayout
    storages: list[Bytes]
    tensors: dict[str, Array | tuple[Array, Array]]
    parts: dict[str, dict[str, Array]]
    heads: tuple[int, int]


@dataclass
class _Built:
    storages: list[Bytes] = field(default_factory=list)
    tensors: dict[str, Array | tuple[Array, Array]] = field(default_factory=dict)
    parts: dict[str, dict[str, Array]] = field(default_factory=dict)
    dims: str = "BHNC"

    def storage(self, nbytes: int, poison: int) -> Bytes:
        pattern = np.arange(nbytes + 2 * SLACK) * 167 % 251  # no two neighbours alike, so that moved poison shows
        self.storages.append(pattern.astype(np.uint8) ^ np.uint8(poison))
        return self.storages[-1][SLACK : SLACK + nbytes]

    def add(self, layer: str, tensor: Array | tuple[Array, Array], **parts: Array) -> None:
        self.tensors[layer] = tensor
        self.parts[layer] = parts


def _halves(t: Array) -> dict[str, Array]:
    half = t.shape[-1] // 2
    return {"k": t[..., :half], "v": t[..., half:]}


def _one_storage(
    built: _Built, g: Geometry, poison: int, order: str, split: Callable[[Array], dict[str, Array]]
) -> None:
    """All layers in one allocation, axes L, B, H, N, C nested in the given order."""
    size = {"L": len(g.layers), "B": g.pages, "H": g.heads, "N": g.tokens, "C": g.elems}
    shape = [size[axis] for axis in order]
    raw = built.storage(int(np.prod(shape)) * np.dtype(g.dtype).itemsize, poison).view(g.dtype).reshape(shape)
    whole = raw.transpose([order.index(axis) for axis in "LBHNC"])
    for index, layer in enumerate(g.layers):
        built.add(layer, whole[index], **split(whole[index]))


def _cpu_split(t: Array) -> dict[str, Array]:
    blocks, heads, tokens, content = t.shape
    flat, half = t.reshape(blocks, heads, tokens * content), tokens * content // 2
    assert np.shares_memory(flat, t)
    keys = flat[..., :half].reshape(blocks, heads, content // 2, tokens).transpose(0, 1, 3, 2)
    return {"k": keys, "v": flat[..., half:].reshape(blocks, heads, tokens, content // 2)}


def _with_two(built: _Built, g: Geometry, poison: int, order: str) -> None:
    """One allocation per layer with keys and values on an axis of size 2; content is one of them."""
    built.dims = order
    size = {"2": 2, "B": g.pages, "H": g.heads, "N": g.tokens, "C": g.elems // 2}
    for layer in g.layers:
        shape = [size[axis] for axis in order]
        t = built.storage(int(np.prod(shape)) * np.dtype(g.dtype).itemsize, poison).view(g.dtype).reshape(shape)
        view = t.transpose([order.index(axis) for axis in "2BHNC"])
        built.add(layer, t, k=view[0], v=view[1])


def _pairs(built: _Built, g: Geometry, poison: int, order: str) -> None:
    built.dims = order
    size = {"B": g.pages, "H": g.heads, "N": g.tokens, "C": g.elems // 2}
    for layer in g.layers:
        shape = [size[axis] for axis in order]
        nbytes = int(np.prod(shape)) * np.dtype(g.dtype).itemsize
        k, v = (built.storage(nbytes, poison).view(g.dtype).reshape(shape) for _ in "kv")
        back = [order.index(axis) for axis in "BHNC"]
        built.add(layer, (k, v), k=k.transpose(back), v=v.transpose(back))


def _build(fmt: str, g: Geometry, poison: int, *, split: bool) -> _Built:
    built = _Built()
    halves: Callable[[Array], dict[str, Array]] = _halves if split else lambda t: {"kv": t}
    orders = {
        "HND": "LBHNC",
        "NHD": "LBNHC",
        "outer-HND": "BLHNC",
        "outer-NHD": "BLNHC",
        "head-outer": "LHBNC",
    }
    if fmt in orders:
        _one_storage(built, g, poison, orders[fmt], halves)
    elif fmt.startswith("MLA"):
        _one_storage(built, g, poison, "BLHNC" if fmt == "MLA-outer" else "LBHNC", lambda t: {"latent": t})
    elif fmt == "CPU":
        _one_storage(built, g, poison, "LBHNC", _cpu_split)
    elif fmt in PAIRS:
        _pairs(built, g, poison, {"pair-HND": "BHNC", "pair-NHD": "BNHC"}[fmt])
    else:
        _with_two(built, g, poison, fmt)
    return built


def make_rank(engine: EngineModel, rank: RankId, geometry: dict[str, Any], groups: dict[str, int]) -> RankCache:
    """Allocate one rank. ``geometry``: elems, dtype, layers, split, poison."""
    shape = engine.shape
    lo, hi = shape.heads(rank.rank)
    layers = shape.stages[rank.pp_rank] if shape.stages else geometry["layers"]
    pages = engine.blocks * engine.per_block
    sizes = Geometry(tuple(layers), pages, hi - lo, engine.page, geometry["elems"], geometry["dtype"])
    built = _build(engine.format, sizes, geometry["poison"], split=geometry["split"])
    kind: Kind = "mla" if shape.is_mla else "cpu" if engine.format == "CPU" else "attention"
    specs = {
        name: LayerSpec(
            (lo, hi), shape.total_heads, engine.block, kind, built.dims, None, geometry["split"], groups[name]
        )
        for name in layers
    }
    tokens = TokenShare(shape.dcp_rank(rank.rank), shape.dcp_size, shape.interleave)
    layout = KVLayout.from_tensors(built.tensors, specs, tokens)
    return RankCache(engine, rank, layout, built.storages, built.tensors, built.parts, (lo, hi))


def place(engine: EngineModel, position: int) -> tuple[int, int, int]:
    """(dcp rank, block of the sequence, slot in the block) of a position, as kvrdma.topology has it."""
    p, w, i, b = position, engine.shape.dcp_size, engine.shape.interleave, engine.block
    return (p // i) % w, p // (b * w), ((p % (b * w)) // (w * i)) * i + p % i


Truth = dict[str, dict[str, Array]]
"""layer -> part -> ``[head of the model, position, D]``."""


@dataclass(frozen=True)
class Blocks:
    """Block ids of a group on one engine; ``first`` leading blocks of the sequence have no id."""

    ids: tuple[int, ...]
    first: int = 0


def write_slow(cache: RankCache, truth: Truth, layer: str, blocks: Blocks, positions: range) -> None:
    """Store what this rank holds of the positions, one (head, token) at a time."""
    engine, (lo, hi) = cache.engine, cache.heads
    for position in positions:
        rank, index, slot = place(engine, position)
        if rank != engine.shape.dcp_rank(cache.rank.rank):
            continue
        page = blocks.ids[index - blocks.first] * engine.per_block + slot // engine.page
        assert index >= blocks.first
        for head in range(lo, hi):
            for name, values in truth[layer].items():
                cache.parts[layer][name][page, head - lo, slot % engine.page] = values[head, position]


def write_fast(cache: RankCache, truth: Truth, layer: str, blocks: Blocks, positions: range) -> None:
    """The same for all tokens at once; a test holds it equal to ``write_slow``."""
    engine, (lo, hi) = cache.engine, cache.heads
    p = np.arange(positions.start, positions.stop)
    w, i, b = engine.shape.dcp_size, engine.shape.interleave, engine.block
    p = p[(p // i) % w == engine.shape.dcp_rank(cache.rank.rank)]
    if not len(p):
        return
    index = p // (b * w) - blocks.first
    assert index.min() >= 0
    slot = ((p % (b * w)) // (w * i)) * i + p % i
    page = np.array(blocks.ids, np.int64)[index] * engine.per_block + slot // engine.page
    for name, values in truth[layer].items():
        cache.parts[layer][name][page, :, slot % engine.page] = values[lo:hi, p].transpose(1, 0, 2)


def read_rows(cache: RankCache, remote: dict[RankId, RankCache], plan: ReadPlan) -> None:
    """Move rows between the storages, as the simplest possible transport."""
    starts = [(s.__array_interface__["data"][0], s) for s in cache.storages]
    for reads in plan.sources:
        peer = remote[reads.source.rank]
        by_addr = {s.__array_interface__["data"][0]: s for s in peer.storages}
        for addr, region, offset, length in reads.rows.tolist():
            source = by_addr[peer.layout.regions[region].addr]
            start, target = next((a, s) for a, s in starts if a <= addr < a + s.nbytes)
            assert addr + length <= start + target.nbytes
            assert offset + length <= source.nbytes
            target[addr - start : addr - start + length] = source[offset : offset + length]


def run_reshape(cache: RankCache, step: PageReshape) -> None:
    """Finish pages by ``reshape(shape).transpose(axes)``, on bytes found through the tensors themselves."""
    shape = (*step.reshape.shape, step.reshape.itemsize)
    axes = (*step.reshape.axes, len(step.reshape.shape))
    for layer in step.layers:
        tensor = cache.tensors[layer]
        apart = isinstance(tensor, tuple) or cache.engine.format.startswith("2B")
        pages = tensor[step.plane] if apart else tensor
        one = pages[0]
        reach = one.itemsize + sum((n - 1) * s for n, s in zip(one.shape, one.strides, strict=True))
        assert reach == one.nbytes, "only pages that are one run of bytes can be reshaped"
        for page in step.pages.tolist():
            addr = pages[page].__array_interface__["data"][0]
            for unit in range(step.reshape.count):
                begin = addr + step.reshape.offset + unit * step.reshape.stride
                piece = _bytes_at(cache, begin, step.reshape.nbytes)
                piece[:] = piece.reshape(shape).transpose(axes).ravel()


def _bytes_at(cache: RankCache, addr: int, nbytes: int) -> Bytes:
    for storage in cache.storages:
        start = storage.__array_interface__["data"][0]
        if start <= addr and addr + nbytes <= start + storage.nbytes:
            return storage[addr - start : addr - start + nbytes]
    raise AssertionError(f"{addr:#x} + {nbytes} is in no storage")


def differing(storages: Sequence[Bytes], expected: Sequence[Bytes]) -> list[tuple[int, int]]:
    """(storage, byte) of the first differing byte in each storage."""
    return [
        (i, int(np.argmax(a != b))) for i, (a, b) in enumerate(zip(storages, expected, strict=True)) if (a != b).any()
    ]
