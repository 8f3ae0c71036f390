"""How one rank's KV cache lies in memory, small enough to send to a peer at the handshake.

``KVLayout.from_tensors`` reads strides and storage of the cache tensors; what comes out are bases and
strides, never lists per block. ``check_compatible`` refuses, at the handshake, every pair that a plan could
not serve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrdma.errors import IncompatibleError, LayoutError
from kvrdma.page_format import LayerSpec, PageFormat, Recognised, TensorView, recognise

_MAX_BYTES = 1 << 62


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
        if self.interleave < 1 or not 0 <= self.dcp_rank < self.dcp_size:
            raise LayoutError(
                f"need interleave >= 1 and 0 <= dcp_rank < dcp_size, got interleave {self.interleave}, "
                f"dcp_rank {self.dcp_rank}, dcp_size {self.dcp_size}"
            )
        if any(not 0 <= n < _MAX_BYTES for r in self.regions for n in (r.addr, r.nbytes, r.addr + r.nbytes)):
            raise LayoutError(f"regions must lie below address {_MAX_BYTES:#x}, got {self.regions}")
        if len(self.by_name()) != len(self.layers):
            raise LayoutError(f"layer names repeat: {sorted(layer.name for layer in self.layers)}")
        for layer in self.layers:
            _check_layer(self, layer)


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


def _check_layer(layout: KVLayout, layer: Layer) -> None:
    where = f"layer {layer.name}"
    if not 0 <= layer.format < len(layout.formats):
        raise LayoutError(f"{where}: format {layer.format} of {len(layout.formats)} formats")
    fmt = layout.format_of(layer)
    lo, hi = layer.heads
    if not 0 <= lo < hi <= layer.total_heads or hi - lo != fmt.heads:
        raise LayoutError(f"{where}: heads [{lo}, {hi}) of {layer.total_heads} do not match pages of {fmt.heads} heads")
    if layer.pages_per_block < 1 or fmt.tokens < 1 or layer.group < 0 or not fmt.parts:
        raise LayoutError(
            f"{where}: pages_per_block {layer.pages_per_block}, tokens {fmt.tokens}, group {layer.group}, "
            f"{len(fmt.parts)} parts: all must be at least 1 (group 0)"
        )
    split = fmt.kind != "state" and layout.dcp_size > 1
    if split and layout.block_size(layer) % layout.interleave:
        raise LayoutError(
            f"{where}: interleave {layout.interleave} does not divide the block of {layout.block_size(layer)} tokens"
        )
    for part in fmt.parts:
        numbers = (part.offset, part.head_stride, part.token_stride, part.elem_stride)
        sizes = (part.elems, part.itemsize, layer.pages_per_block)
        small = min(numbers) >= 0 and min(sizes) >= 1 and max(*numbers, *sizes) < _MAX_BYTES
        if not small or not 0 <= part.plane < len(layer.planes):
            raise LayoutError(f"{where}: {part} is malformed or names none of its {len(layer.planes)} planes")
    for number, plane in enumerate(layer.planes):
        _check_plane(layout, layer, number, plane)


def _check_plane(layout: KVLayout, layer: Layer, number: int, plane: Plane) -> None:
    where = f"layer {layer.name} plane {number}"
    fmt = layout.format_of(layer)
    if not any(part.plane == number for part in fmt.parts):
        raise LayoutError(f"{where}: no part of format {fmt.name} lies in it")
    if not 0 <= plane.region < len(layout.regions) or plane.num_pages < 1:
        raise LayoutError(f"{where}: {plane} does not fit {len(layout.regions)} regions")
    nbytes = layout.regions[plane.region].nbytes
    end = plane.offset + (plane.num_pages - 1) * plane.page_stride + fmt.plane_extent(number)
    if plane.offset < 0 or end > nbytes or not 0 <= plane.page_stride <= nbytes:
        raise LayoutError(
            f"{where}: pages {plane.page_stride} bytes apart span bytes {plane.offset} to {end} of region "
            f"{plane.region} of {nbytes} bytes"
        )


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
