"""What kind of cache a store's blocks belong to, and how a store lays them out in its own memory.

A *family* is every cache of one model with one split over ranks and one block size. All of a block, every layer of
every rank, is one *record*: records lie one after another in the store's memory, so that one is given up and used
again as a whole. Inside it each rank's layers are arrays that ``Engine`` takes like any other cache.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from kvrdma.errors import ConfigError, LayoutError, MessageError
from kvrdma.handshake import Identity
from kvrdma.layout import KVLayout, Layer
from kvrdma.page_format import LayerSpec, PageFormat
from kvrdma.plan.tokens import MAX_PERIOD
from kvrdma.store.keys import new_hasher
from kvrdma.topology import EngineShape
from kvrdma.wire import Name

_ALIGN = 64
_DIMS = {"attention": {"HN": "BHNC", "NH": "BNHC"}, "mla": {"HN": "BNC"}, "cpu": {"HN": "BHNC"}}
_ITEMS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

MAX_BLOCK_TOKENS = 1 << 16
"""Of a store's block."""

Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_TOKENS)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class StoredLayer(msgspec.Struct, frozen=True, array_like=True):
    """One layer as a store keeps it; ``elems`` elements of ``itemsize`` bytes per head and token."""

    name: Name
    kind: Literal["attention", "mla", "cpu"]
    order: Literal["HN", "NH"]
    """Which is outer inside a page: heads or tokens."""
    split: bool
    """Whether the content is keys, then values."""
    elems: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    itemsize: Literal[1, 2, 4, 8]
    dtype: Name


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A family of caches; travels with every offer."""

    model: dict[Name, Name]
    block_tokens: Tokens
    ranks: Annotated[int, msgspec.Meta(ge=1, le=64)]
    """Distinct shares of the kv heads."""
    kv_heads: Heads
    is_mla: bool
    layers: Annotated[tuple[StoredLayer, ...], msgspec.Meta(min_length=1, max_length=4096)]

    @property
    def shape(self) -> EngineShape:
        """The engine that holds it: one rank per share."""
        return EngineShape(self.ranks, self.kv_heads, is_mla=self.is_mla)


_decoder = msgspec.msgpack.Decoder(Family)


def encode_family(family: Family) -> bytes:
    """Serialise; equal families give equal bytes."""
    return msgspec.msgpack.encode(family, order="sorted")


def decode_family(text: bytes) -> Family:
    """Read what ``encode_family`` made.

    Raises:
        MessageError: it is malformed, or a value is out of range.
        TopologyError: heads and ranks do not fit.
    """
    try:
        family = _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(f"the description of a stored cache cannot be read: {error}") from None
    for layer in family.layers:
        if layer.order not in _DIMS[layer.kind] or (layer.split and layer.elems % 2):
            raise MessageError(f"stored layer {layer.name} is malformed: {layer}")
    if len({layer.name for layer in family.layers}) != len(family.layers):
        raise MessageError("the description of a stored cache names a layer twice")
    family.shape  # noqa: B018 - raises
    return family


def family_of(layout: KVLayout, identity: Identity, block_tokens: int) -> Family:
    """Describe the family of a rank's cache.

    Args:
        layout: of the rank's engine.
        identity: of the rank; every rank of its shape holds a share of the kv heads of its own.
        block_tokens: tokens of a store's block.

    Raises:
        LayoutError: the cache has state layers, several KV groups or a split of tokens: stores hold prefixes only.
        ConfigError: no store has blocks of so many tokens, or the engine's do not fit them.
    """
    tokens = _block_tokens(layout, block_tokens)
    if layout.dcp_size != 1:
        raise LayoutError(f"a store cannot hold caches whose tokens are split over {layout.dcp_size} ranks (dcp) yet")
    if len(identity.shape.stages) > 1:
        raise LayoutError("give each pipeline stage a family of its own: an identity of one stage with its layers")
    layers = tuple(_stored(layer, layout.format_of(layer)) for layer in layout.layers)
    shape = identity.shape
    family = Family(dict(identity.model), tokens, shape.num_ranks, shape.num_kv_heads, shape.is_mla, layers)
    try:
        decode_family(encode_family(family))  # as every store will
    except MessageError as error:
        raise LayoutError(f"a store cannot hold these caches: {error}") from None
    return family


def _block_tokens(layout: KVLayout, given: int) -> int:
    """Read the tokens of a store's block."""
    try:
        tokens = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        tokens = 0
    if not 1 <= tokens <= MAX_BLOCK_TOKENS:
        raise ConfigError(f"block_tokens={given!r:.80} is not a whole number from 1 to {MAX_BLOCK_TOKENS}")
    for layer in layout.layers:
        page = layout.format_of(layer).tokens
        if math.lcm(page, tokens) > MAX_PERIOD:
            raise ConfigError(
                f"block_tokens={tokens} and the pages of {page} tokens of layer {layer.name} line up only every "
                f"{math.lcm(page, tokens)} tokens, more than {MAX_PERIOD}: use a multiple of {page} as block_tokens"
            )
    return tokens


def _stored(layer: Layer, fmt: PageFormat) -> StoredLayer:
    if fmt.kind == "state" or layer.group:
        raise LayoutError(
            f"layer {layer.name} ({fmt.name}, KV group {layer.group}) cannot be stored by prefix: only layers with "
            "full attention, in group 0, can"
        )
    first = fmt.parts[0]
    order: Literal["HN", "NH"] = "HN"
    if fmt.kind == "attention" and fmt.heads > 1 and first.head_stride < first.token_stride:
        order = "NH"
    elems = sum(part.elems for part in fmt.parts)
    if first.itemsize not in _ITEMS:
        raise LayoutError(f"layer {layer.name}: elements of {first.itemsize} bytes cannot be stored")
    return StoredLayer(layer.name, fmt.kind, order, len(fmt.parts) == 2, elems, first.itemsize, fmt.dtype)  # type: ignore[arg-type]


def fingerprint(family: Family) -> bytes:
    """Give 32 bytes that are the same for all caches whose blocks a reader could use, however they are split."""
    layers = sorted((layer.name, layer.elems, layer.itemsize, layer.split, layer.dtype) for layer in family.layers)
    heads = 1 if family.is_mla else family.kv_heads
    text = msgspec.msgpack.encode((sorted(family.model.items()), family.block_tokens, heads, family.is_mla, layers))
    digest: bytes = new_hasher()(b"kvrdma family 1" + text).digest()
    return digest


def _page_nbytes(layer: StoredLayer, heads: int, tokens: int) -> int:
    return -(-heads * tokens * layer.elems * layer.itemsize // _ALIGN) * _ALIGN


def record_nbytes(family: Family) -> int:
    """Bytes of one record: one block of every layer and rank."""
    return sum(_slice_nbytes(family, rank) for rank in range(family.ranks))


def _slice_nbytes(family: Family, rank: int) -> int:
    low, high = family.shape.heads(rank)
    return sum(_page_nbytes(layer, high - low, family.block_tokens) for layer in family.layers)


def views(
    arena: np.ndarray[Any, np.dtype[np.uint8]], family: Family, rank: int
) -> tuple[Mapping[str, np.ndarray[Any, Any]], Mapping[str, LayerSpec]]:
    """Lay the share of one rank over all of the store's memory.

    Args:
        arena: one-dimensional uint8, the whole memory.
        family: of the caches.
        rank: which share.

    Returns:
        By layer: an array over ``arena`` whose block ``i`` lies in record ``i``, and what its shape cannot say.
    """
    stride, low, high = record_nbytes(family), *family.shape.heads(rank)
    records = len(arena) // stride
    offset = sum(_slice_nbytes(family, other) for other in range(rank))
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    specs: dict[str, LayerSpec] = {}
    for layer in family.layers:
        dims = _DIMS[layer.kind][layer.order]
        size = {"H": high - low, "N": family.block_tokens, "C": layer.elems}
        inner = [size[dim] for dim in dims[1:]]
        steps = [layer.itemsize * int(np.prod(inner[i + 1 :], dtype=np.int64)) for i in range(len(inner))]
        arrays[layer.name] = np.ndarray(
            (records, *inner), _ITEMS[layer.itemsize], arena, offset=offset, strides=(stride, *steps)
        )
        specs[layer.name] = LayerSpec(
            heads=(low, high),
            total_heads=family.shape.total_heads,
            block_size=family.block_tokens,
            kind=layer.kind,
            dims=dims,
            dtype=layer.dtype,
            kv_split=layer.split,
        )
        offset += _page_nbytes(layer, high - low, family.block_tokens)
    return arrays, specs
