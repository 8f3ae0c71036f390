"""Recognises how one layer's cache tensor stores its pages, from shape and strides alone.

A page is one block of one layer. Every known format is the same statement: the bytes of (part, head, token)
lie at ``offset + head * head_stride + token * token_stride``, as ``elems`` elements ``elem_stride`` apart. A
*part* is a named piece of a token's content: ``k`` and ``v``, one undivided ``kv``, or an MLA ``latent``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np

from kvrdma.errors import LayoutError

Kind: TypeAlias = Literal["attention", "mla", "cpu", "state"]

KNOWN_FORMATS = (
    "known formats: attention BHNC, BNHC, 2BHNC, 2BNHC, B2HNC, B2NHC (C innermost: keys, then values) or a (keys, "
    "values) pair of BHNC or BNHC; mla BNC, or BHNC and BNHC with H = 1; cpu BHNC, each (block, head) dense: keys "
    "[D, N], then values [N, D]; state B first, each block dense (B blocks, H kv heads, N tokens, C content)"
)
_DIMS: dict[str, tuple[str, ...]] = {
    "attention": ("BHNC", "BNHC", "2BHNC", "2BNHC", "B2HNC", "B2NHC"),
    "pair": ("BHNC", "BNHC"),
    "mla": ("BNC", "BHNC", "BNHC"),
    "cpu": ("BHNC",),
}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Says what a tensor cannot: which heads it holds and what its bytes mean.

    Attributes:
        heads: kv heads ``[lo, hi)`` of this rank; ``(rank, rank + 1)`` for state, ``(0, 1)`` for MLA.
        total_heads: kv heads of the layer in the whole model (ranks that share a state, 1 for MLA).
        block_size: tokens of a block as block ids count them; a tensor may hold it as several smaller
            kernel blocks. 1 for state.
        kind: what the bytes are.
        dims: order of the tensor's axes, such as ``"BNHC"``; needed only where sizes leave a doubt.
        dtype: element type, where the tensor is a view of another type (raw int8).
        kv_split: whether the content of one tensor is keys then values, of equal size.
        group: which list of block ids the layer uses.
    """

    heads: tuple[int, int]
    total_heads: int
    block_size: int
    kind: Kind = "attention"
    dims: str | None = None
    dtype: str | None = None
    kv_split: bool = True
    group: int = 0

    def __post_init__(self) -> None:
        """Refuse what no layout can hold; NumPy's numbers become plain ones, for peers are told of them.

        Raises:
            LayoutError: names the field, and what is given.
        """
        check_kind("LayerSpec", self.kind, self.dims, self.dtype, self.kv_split)
        numbers = _whole(self.heads)
        if numbers is None or len(numbers) != 2:
            raise LayoutError(f"LayerSpec: heads={self.heads!r:.80} are not two whole numbers (lo, hi)")
        object.__setattr__(self, "heads", numbers)
        for name in ("total_heads", "block_size", "group"):
            number = _whole((getattr(self, name),))
            if number is None:
                raise LayoutError(f"LayerSpec: {name}={getattr(self, name)!r:.80} is not a whole number")
            object.__setattr__(self, name, number[0])


def check_kind(where: str, kind: object, dims: object, dtype: object, kv_split: object) -> None:
    """Refuse a description of a cache's content that is no such.

    Raises:
        LayoutError: names the field, and what it may be.
    """
    if kind not in get_args(Kind):
        raise LayoutError(f"{where}: kind={kind!r:.80} is none of {', '.join(get_args(Kind))}")
    for name, text in (("dims", dims), ("dtype", dtype)):
        if text is not None and not isinstance(text, str):
            raise LayoutError(f"{where}: {name}={text!r:.80} must be a text or None")
    if not isinstance(kv_split, bool):
        raise LayoutError(f"{where}: kv_split={kv_split!r:.80} must be True or False")


def _whole(values: object) -> tuple[int, ...] | None:
    """Read whole numbers of whatever class; None where something is none."""
    if not isinstance(values, tuple | list) or bool in set(map(type, values)):
        return None
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        return None


class Part(msgspec.Struct, frozen=True):
    """Places one part of the content inside a page; strides and offset in bytes.

    ``plane`` is 1 for values apart from the keys: of a (keys, values) pair, or behind a leading axis of 2.
    """

    name: str
    plane: int
    offset: int
    head_stride: int
    token_stride: int
    elem_stride: int
    elems: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of this part for one head and token."""
        return self.elems * self.itemsize


class PageFormat(msgspec.Struct, frozen=True):
    """Describes the inside of a page, the same for every layer that has it.

    ``name`` is for people; equality of bytes is decided by the parts. ``tokens`` are those of one page, which
    may be a fraction of a block.
    """

    name: str
    kind: Kind
    dtype: str
    heads: int
    tokens: int
    parts: tuple[Part, ...]

    def plane_extent(self, plane: int) -> int:
        """Bytes from the start of a page to its last byte in that plane."""
        return max(
            p.offset
            + (self.heads - 1) * p.head_stride
            + (self.tokens - 1) * p.token_stride
            + (p.elems - 1) * p.elem_stride
            + p.itemsize
            for p in self.parts
            if p.plane == plane
        )

    def plane_nbytes(self, plane: int) -> int:
        """Content bytes of a page in that plane; equals the extent where the page has no holes."""
        return sum(self.heads * self.tokens * p.nbytes for p in self.parts if p.plane == plane)

    def is_dense(self, plane: int) -> bool:
        """Whether a page is one run of bytes in that plane: only such pages can be reshaped."""
        return self.plane_extent(plane) == self.plane_nbytes(plane)


@dataclass(frozen=True, slots=True)
class TensorView:
    """Shape, byte strides and storage of a torch tensor or numpy array, without keeping it alive."""

    addr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    storage_addr: int
    storage_nbytes: int

    @classmethod
    def of(cls, tensor: Any) -> TensorView:  # noqa: ANN401 -- torch is optional; told apart by its methods
        """Read a torch tensor (anything with ``untyped_storage``) or a numpy array; keep a view."""
        if isinstance(tensor, cls):
            return tensor
        if hasattr(tensor, "untyped_storage"):
            return cls._of_torch(tensor)
        if not isinstance(tensor, np.ndarray) or tensor.dtype.hasobject:
            kind = f"{type(tensor).__name__} of {getattr(tensor, 'dtype', 'no dtype')}"
            raise LayoutError(f"cannot read strides of a {kind}: need a torch tensor or an array of numbers")
        root = tensor
        while isinstance(root.base, np.ndarray):
            root = root.base
        steps = [(n - 1) * s for n, s in zip(root.shape, root.strides, strict=True)]
        low = _address(root) + sum(step for step in steps if step < 0)
        nbytes = root.itemsize + sum(abs(step) for step in steps) if root.size else 0
        dtype, addr = tensor.dtype.name, _address(tensor)
        return cls(addr, tensor.shape, tensor.strides, tensor.itemsize, dtype, low, nbytes)

    @classmethod
    def _of_torch(cls, tensor: Any) -> TensorView:  # noqa: ANN401 -- as above
        try:
            storage, size = tensor.untyped_storage(), int(tensor.element_size())
            strides = tuple(int(s) * size for s in tensor.stride())
            place = (int(storage.data_ptr()), int(storage.nbytes()))
            addr = int(tensor.data_ptr())
        except RuntimeError as error:
            raise LayoutError(
                f"cannot read strides of a torch tensor of layout {tensor.layout} on {tensor.device}, need a dense one "
                f"with memory: {error}"
            ) from None
        if not place[0] and place[1]:
            raise LayoutError(f"a tensor on {tensor.device} has no memory: need one on cpu or cuda")
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(addr, tuple(int(n) for n in tensor.shape), strides, size, dtype, *place)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


@dataclass(frozen=True, slots=True)
class Recognised:
    """A page format with what differs per layer: views of the planes and bytes from block to block."""

    format: PageFormat
    views: tuple[TensorView, ...]
    block_strides: tuple[int, ...]
    num_blocks: int


def recognise(layer: str, tensors: Sequence[TensorView], spec: LayerSpec) -> Recognised:
    """Find the page format of a layer.

    Args:
        layer: name, for messages.
        tensors: one view, or two for separate keys and values.
        spec: what the tensor cannot say.

    Raises:
        LayoutError: names layer, shape, strides and the formats that are known.
    """
    view = tensors[0]
    if len(tensors) > 1 and (spec.kind != "attention" or _geometry(view) != _geometry(tensors[-1])):
        raise _unknown(layer, view, f"values differ from it: {_geometry(tensors[-1])} or kind {spec.kind!r}")
    if len(tensors) > 2:
        raise _unknown(layer, view, f"it is one of {len(tensors)} tensors")
    if not view.shape or 0 in view.shape:
        raise _unknown(layer, view, "it is empty")
    if spec.kind == "state":
        return _state(layer, view, spec)
    dims = _find_dims(layer, tensors, spec)
    size = dict(zip(dims, view.shape, strict=True))
    stride = _steps(dims, view)
    _check_strides(layer, view, dims)
    if stride["C"] != view.itemsize:
        raise _unknown(layer, view, f"its content axis steps {stride['C']} bytes, not one {view.itemsize}-byte element")
    name = _format_name(spec, size, stride, pair=len(tensors) == 2)
    if stride.get("2", -1) >= stride["B"]:  # blocks lie inside the axis of 2: two planes in one storage
        tensors = (view, replace(view, addr=view.addr + stride["2"]))
    parts = _cpu_parts(layer, view, dims) if spec.kind == "cpu" else _parts(tensors, spec, size, stride)
    dtype = spec.dtype or view.dtype
    fmt = PageFormat(name, spec.kind, dtype, size.get("H", 1), size["N"], parts)
    return Recognised(fmt, tuple(tensors), (stride["B"],) * len(tensors), size["B"])


def _geometry(view: TensorView) -> tuple[object, ...]:
    return view.shape, view.strides, view.itemsize, view.dtype


def _unknown(layer: str, view: TensorView, why: str) -> LayoutError:
    return LayoutError(
        f"layer {layer}: cannot use a tensor of shape {view.shape}, byte strides {view.strides}, dtype "
        f"{view.dtype}: {why}\n{KNOWN_FORMATS}"
    )


def _find_dims(layer: str, tensors: Sequence[TensorView], spec: LayerSpec) -> str:
    view, heads = tensors[0], spec.heads[1] - spec.heads[0]
    known = _DIMS["pair" if len(tensors) == 2 else spec.kind]
    axes = sorted({len(dims) for dims in known})
    if len(view.shape) not in axes:
        needed = " or ".join(map(str, axes))
        raise _unknown(layer, view, f"it has {len(view.shape)} axes, {spec.kind} needs {needed}")
    wanted = [spec.dims] if spec.dims else [d for d in known if len(d) == len(view.shape)]

    def fits(dims: str) -> bool:
        if dims not in known or len(dims) != len(view.shape):
            return False
        size = dict(zip(dims, view.shape, strict=True))
        return size.get("H", 1) == heads and spec.block_size % size["N"] == 0 and size.get("2", 2) == 2

    found = [dims for dims in wanted if fits(dims)]
    if not found:
        raise _unknown(
            layer,
            view,
            f"no known order of axes has {heads} heads and blocks of {spec.block_size} tokens, dims {spec.dims}",
        )
    if len({tuple(zip(d, view.shape, strict=True)) for d in found}) > 1 and not _same_meaning(found, view):
        raise _unknown(layer, view, f"its axes may be any of {found}: say which with LayerSpec(dims=...)")
    return found[0]


def _same_meaning(found: Sequence[str], view: TensorView) -> bool:
    """Whether the candidates differ only in axes of size 1, so that any of them is right."""
    return len({tuple((d, n) for d, n in zip(dims, view.shape, strict=True) if n > 1) for dims in found}) == 1


def _steps(dims: str, view: TensorView) -> dict[str, int]:
    """Byte strides by axis; the step of an axis of size 1 means nothing and is left out."""
    steps = {d: s if n > 1 else 0 for d, s, n in zip(dims, view.strides, view.shape, strict=True)}
    return {**steps, "C": steps["C"] or view.itemsize}


def _check_strides(layer: str, view: TensorView, dims: str) -> None:
    """Refuse axes that share bytes, and the block axis inside the content."""
    axes = sorted((s, n, d) for s, n, d in zip(view.strides, view.shape, dims, strict=True) if n > 1)
    reach = view.itemsize
    for stride, count, dim in axes:
        if stride < reach:
            raise _unknown(layer, view, f"axis {dim} steps {stride} bytes but {reach} bytes lie inside it")
        reach = stride * count


def _parts(
    tensors: Sequence[TensorView], spec: LayerSpec, size: dict[str, int], stride: dict[str, int]
) -> tuple[Part, ...]:
    item, elems = tensors[0].itemsize, size["C"]
    step = (stride.get("H", 0), stride["N"], item)
    if spec.kind == "mla":
        return (Part("latent", 0, 0, *step, elems, item),)
    if len(tensors) == 2:
        return tuple(Part(name, plane, 0, *step, elems, item) for plane, name in enumerate("kv"))
    if "2" in size:
        return tuple(Part(name, 0, i * stride["2"], *step, elems, item) for i, name in enumerate("kv"))
    if not spec.kv_split or elems % 2:
        return (Part("kv", 0, 0, *step, elems, item),)
    half = elems // 2
    return tuple(Part(name, 0, i * half * item, *step, half, item) for i, name in enumerate("kv"))


def _cpu_parts(layer: str, view: TensorView, dims: str) -> tuple[Part, ...]:
    size = dict(zip(dims, view.shape, strict=True))
    stride = _steps(dims, view)
    item, tokens, elems = view.itemsize, size["N"], size["C"] // 2
    if size["C"] % 2 or (tokens > 1 and stride["N"] != size["C"] * item):
        raise _unknown(layer, view, "a cpu page needs keys and values of equal size and dense (block, head) pages")
    head = stride["H"]
    keys = Part("k", 0, 0, head, item, tokens * item, elems, item)
    return keys, Part("v", 0, tokens * elems * item, head, elems * item, item, elems, item)


def _state(layer: str, view: TensorView, spec: LayerSpec) -> Recognised:
    _check_strides(layer, view, "B" + "s" * (len(view.shape) - 1))
    nbytes = math.prod(view.shape[1:]) * view.itemsize
    reach = view.itemsize + sum((n - 1) * s for n, s in zip(view.shape[1:], view.strides[1:], strict=True))
    if reach != nbytes or spec.heads[1] - spec.heads[0] != 1 or spec.block_size != 1:
        raise _unknown(
            layer,
            view,
            f"a state page must be dense, one share and block_size 1: {nbytes} bytes spread "
            f"over {reach}, heads {spec.heads}, block_size {spec.block_size}",
        )
    part = Part("state", 0, 0, nbytes, nbytes, 1, nbytes, 1)
    fmt = PageFormat("state", "state", spec.dtype or view.dtype, 1, 1, (part,))
    stride = view.strides[0] if view.shape[0] > 1 else 0
    return Recognised(fmt, (view,), (stride,), view.shape[0])


def _format_name(spec: LayerSpec, size: dict[str, int], stride: dict[str, int], *, pair: bool) -> str:
    if spec.kind != "attention":
        return {"mla": "MLA", "cpu": "CPU"}[spec.kind]
    order = "HND" if stride["H"] >= stride["N"] or size["H"] == 1 else "NHD"
    split = " (keys, values)" if pair else " (2)" if "2" in size else ""
    outer = " block-inner" if stride["B"] < stride["H"] and size["H"] > 1 else ""
    return order + split + outer
