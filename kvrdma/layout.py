"""How one rank's KV cache lies in memory, small enough to send to a peer at the handshake.

``KVLayout.from_tensors`` reads strides and storage of the cache tensors; what comes out are bases and
strides, never lists per block. ``check_compatible`` refuses, at the handshake, every pair that a plan could
not serve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrdma.errors import IncompatibleError, LayoutError
from kvrdma.page_format import LayerSpec, PageFormat, Recognised, TensorView, recognise
from kvrdma.strides import Piece, nested, shared

_MAX_BYTES = 1 << 62
_MAX_COUNT = 1 << 16
_MAX_TOKENS = 1 << 20
_MAX_LAYERS = 1 << 12
_MAX_PARTS = 16


class Storage(msgspec.Struct, frozen=True):
    """One allocation to register: address in its own process, and bytes."""

    addr: int
    nbytes: int


class Plane(msgspec.Struct, frozen=True):
    """Places the pages of one tensor of a layer: page ``b`` starts at ``offset + b * page_stride``.

    ``region`` indexes ``KVLayout.regions``; ``offset`` and ``page_stride`` are bytes in that region.
    """

    region: int
    offset: int
    page_stride: int
    num_pages: int


class Layer(msgspec.Struct, frozen=True):
    """One layer's share on a rank.

    ``format`` indexes ``KVLayout.formats``; ``pages_per_block`` is the number of pages that one block id
    names (more than 1 where the engine splits blocks for its kernels); ``group`` selects the list of block
    ids.
    """

    name: str
    group: int
    format: int
    heads: tuple[int, int]
    total_heads: int
    pages_per_block: int
    planes: tuple[Plane, ...]


@dataclass(frozen=True, slots=True)
class TokenShare:
    """Says which positions a rank holds: those with ``(p // interleave) % dcp_size == dcp_rank``."""

    dcp_rank: int = 0
    dcp_size: int = 1
    interleave: int = 1


class KVLayout(msgspec.Struct, frozen=True, cache_hash=True):
    """The whole cache of one rank: regions to register, page formats, layers, share of the tokens.

    Serialise with ``msgspec.msgpack.encode`` and decode with ``type=KVLayout``; call ``validate`` on what
    came from elsewhere.
    """

    regions: tuple[Storage, ...]
    formats: tuple[PageFormat, ...]
    layers: tuple[Layer, ...]
    dcp_rank: int = 0
    dcp_size: int = 1
    interleave: int = 1

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Any],
        specs: LayerSpec | Mapping[str, LayerSpec],
        tokens: TokenShare | None = None,
    ) -> KVLayout:
        """Read the layout off the cache tensors.

        Args:
            tensors: layer name to a torch tensor, a numpy array, or a (keys, values) pair of them. Only
                shape, strides and storage are read; the caller keeps the memory alive.
            specs: what the tensors cannot say, for all layers or by name.
            tokens: this rank's share of the positions; all of them by default.

        Raises:
            LayoutError: a tensor is in no known format, or a layer has no spec.
        """
        share = tokens or TokenShare()
        views: dict[str, Recognised] = {}
        by_layer: dict[str, LayerSpec] = {}
        for name, tensor in tensors.items():
            _check_name(name)
            spec = specs if isinstance(specs, LayerSpec) else specs.get(name)
            if spec is None:
                raise LayoutError(f"layer {name} has no LayerSpec: specs name {sorted(specs)}")  # type: ignore[arg-type]
            planes = tensor if isinstance(tensor, tuple | list) else (tensor,)
            views[name] = recognise(name, [TensorView.of(plane) for plane in planes], spec)
            by_layer[name] = spec
        regions = _storages(view for found in views.values() for view in found.views)
        formats = tuple(dict.fromkeys(found.format for found in views.values()))
        layers = tuple(_layer(name, by_layer[name], found, (regions, formats)) for name, found in views.items())
        layout = cls(regions, formats, layers, share.dcp_rank, share.dcp_size, share.interleave)
        layout.validate()
        return layout

    def format_of(self, layer: Layer) -> PageFormat:
        """The page format of one of this layout's layers."""
        return self.formats[layer.format]

    def block_size(self, layer: Layer) -> int:
        """Tokens of this rank in one block of the layer."""
        return self.format_of(layer).tokens * layer.pages_per_block

    def by_name(self) -> dict[str, Layer]:
        """Layers by name."""
        return {layer.name: layer for layer in self.layers}

    def validate(self) -> None:
        """Check that every number fits the others, as for a layout received from a peer.

        Raises:
            LayoutError: names the layer or field and the values.
        """
        if not 1 <= self.interleave <= _MAX_COUNT or not 0 <= self.dcp_rank < self.dcp_size <= _MAX_COUNT:
            raise LayoutError(
                f"need 1 <= interleave <= {_MAX_COUNT} and 0 <= dcp_rank < dcp_size <= {_MAX_COUNT}, got interleave "
                f"{self.interleave}, dcp_rank {self.dcp_rank}, dcp_size {self.dcp_size}"
            )
        for number, region in enumerate(self.regions):
            if not all(0 <= n < _MAX_BYTES for n in (region.addr, region.nbytes, region.addr + region.nbytes)):
                raise LayoutError(f"regions must lie below address {_MAX_BYTES:#x}, got region {number}: {region}")
        if len(self.layers) > _MAX_LAYERS:
            raise LayoutError(f"{len(self.layers)} layers are more than the {_MAX_LAYERS} of any model")
        names = Counter(layer.name for layer in self.layers)
        if len(names) != len(self.layers):
            raise LayoutError(f"layer names repeat: {names.most_common(1)[0][0]} stands for several layers")
        extents = [_check_format(number, fmt) for number, fmt in enumerate(self.formats)]
        for layer in self.layers:
            _check_layer(self, layer, extents)
        _check_disjoint(self)


def _check_name(name: object) -> None:
    """Refuse a name that no peer could read."""
    try:
        good = isinstance(name, str) and bool(name.encode())
    except UnicodeEncodeError:  # half a character
        good = False
    if not good:
        raise LayoutError(f"layer {name!r:.80} must be named by a text that is not empty")


def _storages(views: Iterable[TensorView]) -> tuple[Storage, ...]:
    """One region per storage, in order of first use."""
    return tuple(dict.fromkeys(Storage(view.storage_addr, view.storage_nbytes) for view in views))


def _layer(
    name: str, spec: LayerSpec, found: Recognised, tables: tuple[tuple[Storage, ...], tuple[PageFormat, ...]]
) -> Layer:
    regions, formats = tables
    planes = tuple(
        Plane(
            regions.index(Storage(view.storage_addr, view.storage_nbytes)),
            view.addr - view.storage_addr,
            stride,
            found.num_blocks,
        )
        for view, stride in zip(found.views, found.block_strides, strict=True)
    )
    ratio = spec.block_size // found.format.tokens
    index = formats.index(found.format)
    return Layer(name, spec.group, index, spec.heads, spec.total_heads, ratio, planes)


def _check_format(number: int, fmt: PageFormat) -> list[int]:
    """Check the inside of a page; the result is the extent of each of its planes."""
    where = f"format {number} ({fmt.name})"
    if fmt.kind not in _MEANING or not 1 <= fmt.tokens <= _MAX_TOKENS or not 1 <= fmt.heads <= _MAX_COUNT:
        raise LayoutError(
            f"{where}: need a kind of {sorted(_MEANING)}, 1 to {_MAX_TOKENS} tokens and 1 to {_MAX_COUNT} heads, got "
            f"{fmt.kind!r}, {fmt.tokens} tokens, {fmt.heads} heads"
        )
    if not 1 <= len(fmt.parts) <= _MAX_PARTS or len({part.name for part in fmt.parts}) < len(fmt.parts):
        names = sorted({part.name for part in fmt.parts})[:_MAX_PARTS]
        raise LayoutError(f"{where}: need 1 to {_MAX_PARTS} parts of different names, got {len(fmt.parts)}: {names}")
    for part in fmt.parts:
        numbers = (part.plane, part.offset, part.head_stride, part.token_stride, part.elem_stride)
        sizes = (part.elems, part.itemsize)
        if min(numbers) < 0 or min(sizes) < 1 or max(*numbers, *sizes) >= _MAX_BYTES:
            raise LayoutError(f"{where}: {part} is malformed: sizes start at 1, strides and offsets at 0")
    planes = sorted({part.plane for part in fmt.parts})
    if planes != list(range(len(planes))):
        raise LayoutError(f"{where}: its parts name planes {planes}, which must count from 0")
    return [fmt.plane_extent(plane) for plane in planes]


def _check_layer(layout: KVLayout, layer: Layer, extents: Sequence[Sequence[int]]) -> None:
    where = f"layer {layer.name}"
    if not 0 <= layer.format < len(layout.formats):
        raise LayoutError(f"{where}: format {layer.format} of {len(layout.formats)} formats")
    fmt = layout.format_of(layer)
    lo, hi = layer.heads
    if not 0 <= lo < hi <= layer.total_heads <= _MAX_COUNT or hi - lo != fmt.heads:
        raise LayoutError(f"{where}: heads [{lo}, {hi}) of {layer.total_heads} do not match pages of {fmt.heads} heads")
    if not 1 <= layer.pages_per_block <= _MAX_COUNT or not 0 <= layer.group < _MAX_COUNT:
        raise LayoutError(
            f"{where}: pages_per_block {layer.pages_per_block} must be 1 to {_MAX_COUNT}, group {layer.group} "
            f"0 to {_MAX_COUNT - 1}"
        )
    split = fmt.kind != "state" and layout.dcp_size > 1
    if split and layout.block_size(layer) % layout.interleave:
        raise LayoutError(
            f"{where}: interleave {layout.interleave} does not divide the block of {layout.block_size(layer)} tokens"
        )
    if len(layer.planes) != len(extents[layer.format]):
        raise LayoutError(
            f"{where}: format {fmt.name} names {len(extents[layer.format])} planes, the layer has {len(layer.planes)}"
        )
    for number, (plane, extent) in enumerate(zip(layer.planes, extents[layer.format], strict=True)):
        _check_plane(layout, f"{where} plane {number}", plane, extent)
        if plane.num_pages < layer.pages_per_block:
            raise LayoutError(
                f"{where} plane {number}: its {plane.num_pages} pages hold no block of {layer.pages_per_block} pages"
            )


def _check_plane(layout: KVLayout, where: str, plane: Plane, extent: int) -> None:
    if not 0 <= plane.region < len(layout.regions) or plane.num_pages < 1:
        raise LayoutError(f"{where}: {plane} does not fit {len(layout.regions)} regions")
    nbytes = layout.regions[plane.region].nbytes
    end = plane.offset + (plane.num_pages - 1) * plane.page_stride + extent
    if plane.offset < 0 or end > nbytes or not 0 <= plane.page_stride <= nbytes:
        raise LayoutError(
            f"{where}: pages {plane.page_stride} bytes apart span bytes {plane.offset} to {end} of region "
            f"{plane.region} of {nbytes} bytes"
        )


def _check_disjoint(layout: KVLayout) -> None:
    """Refuse layers of one group that share bytes with one another or with themselves.

    Layers of different groups may lie on the same bytes: their blocks are never in use together.
    """
    groups: dict[int, list[tuple[Piece, str]]] = {}
    for layer in layout.layers:
        groups.setdefault(layer.group, []).extend(_pieces(layout, layer))
    for group, pieces in groups.items():
        both = shared(pieces)
        if both is not None:
            raise LayoutError(
                f"{both[0]} and {both[1]} of KV group {group} share bytes: parts and layers of a group must lie apart; "
                "list a cache that several layers share once, under one name"
            )


def _pieces(layout: KVLayout, layer: Layer) -> Iterator[tuple[Piece, str]]:
    """Where each part of a layer lies in the address space of its process."""
    fmt = layout.format_of(layer)
    for part in fmt.parts:
        plane = layer.planes[part.plane]
        start = layout.regions[plane.region].addr + plane.offset + part.offset
        axes = [(part.head_stride, fmt.heads), (part.token_stride, fmt.tokens), (part.elem_stride, part.elems)]
        piece = nested(start, [*axes, (plane.page_stride, plane.num_pages)], part.itemsize)
        if not isinstance(piece, Piece):
            raise LayoutError(
                f"layer {layer.name} part {part.name}: an axis steps {piece[0]} bytes but {piece[1]} bytes lie inside "
                f"it: {part}, pages {plane.page_stride} bytes apart"
            )
        yield piece, f"layer {layer.name} part {part.name}"


_MEANING = {"attention": "keys and values", "cpu": "keys and values", "mla": "latent", "state": "state"}


def check_compatible(local: KVLayout, remote: KVLayout) -> None:
    """Refuse a pair of ranks whose shared layers a plan could not serve.

    Only layers that both have are compared, so pipeline stages may differ. Block sizes, head shares, token
    shares and page formats may differ too. That all ranks together cover what is needed is checked when their
    plan is prepared (``Planner``), also at the handshake.

    Raises:
        IncompatibleError: names layer, field and both values.
    """
    remote_layers = remote.by_name()
    for layer in local.layers:
        other = remote_layers.get(layer.name)
        if other is not None:
            _check_layers(local, layer, remote, other)


def _check_layers(local: KVLayout, mine: Layer, remote: KVLayout, theirs: Layer) -> None:
    one, two = local.format_of(mine), remote.format_of(theirs)
    fields: list[tuple[str, object, object, str]] = [
        ("content", _MEANING[one.kind], _MEANING[two.kind], ""),
        ("dtype", one.dtype, two.dtype, "KV is moved as it is: set the same cache dtype on both engines"),
        ("kv heads of the model", mine.total_heads, theirs.total_heads, ""),
        ("group", mine.group, theirs.group, "list layers in the same KV groups on both engines"),
        ("parts", _part_bytes(one), _part_bytes(two), "name -> bytes per head and token"),
    ]
    if one.kind == two.kind == "state":
        sizes = (local.block_size(mine), remote.block_size(theirs))
        fields.append(("state shares", (mine.heads, sizes[0]), (theirs.heads, sizes[1]), "state is moved whole"))
    elements = {part.itemsize for fmt in (one, two) for part in fmt.parts if part.elem_stride != part.itemsize}
    if len(elements) > 1:
        fields.append(("element bytes", _item_bytes(one), _item_bytes(two), "transposed keys need equal elements"))
    for name, value, other, hint in fields:
        if value != other:
            raise IncompatibleError(
                f"layer {mine.name}: {name} differ: local {value} ({one.name}), remote {other} ({two.name})"
                + (f"; {hint}" if hint else "")
            )


def _part_bytes(fmt: PageFormat) -> dict[str, int]:
    return {part.name: part.nbytes for part in sorted(fmt.parts, key=lambda part: part.name)}


def _item_bytes(fmt: PageFormat) -> list[int]:
    return sorted({part.itemsize for part in fmt.parts})
