"""Reads a cache tensor as pages at addresses, so that every kernel takes the same four numbers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvrdma.errors import ReshapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from kvrdma.reshape.spec import Reshape

    Tensor = torch.Tensor | NDArray[np.generic]
    Pages = Sequence[int] | torch.Tensor | NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """Pages at ``addr + p * page_stride`` for ``p`` in ``range(num_pages)``; the caller keeps them alive.

    Attributes:
        addr: address of page 0.
        page_stride: bytes from one page to the next, at least ``page_nbytes``.
        num_pages: pages there are; every index is checked against it.
        page_nbytes: dense bytes of a page.
        device: CUDA device ordinal, None for host memory.
    """

    addr: int
    page_stride: int
    num_pages: int
    page_nbytes: int
    device: int | None = None

    def __post_init__(self) -> None:
        if self.num_pages > 1 and self.page_stride < self.page_nbytes:
            raise ReshapeError(
                f"pages overlap: stride {self.page_stride} is less than the {self.page_nbytes} bytes of one"
            )

    def require(self, reshape: Reshape) -> None:
        """Raises ``ReshapeError`` unless the units of ``reshape`` lie inside a page."""
        if reshape.page_nbytes > self.page_nbytes:
            raise ReshapeError(
                f"reshape of {reshape.count} units of shape {reshape.shape} x {reshape.itemsize} bytes from "
                f"offset {reshape.offset} needs {reshape.page_nbytes} bytes of each page, pages have "
                f"{self.page_nbytes}: plan it for this layout"
            )


def paged(tensor: Tensor) -> PagedMemory:
    """Describes a tensor ``[pages, ...]`` of any dtype whose axis 0 counts pages.

    Accepts torch tensors on the CPU or a CUDA device, NumPy and CuPy arrays. Inside a page the axes may be
    in any memory order (head-major, token-major) but without gaps.

    Raises:
        ReshapeError: a page is not one dense run of bytes, pages overlap, the device is unknown, or the elements are
            Python objects.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _paged_torch(tensor)
    interface = getattr(tensor, "__cuda_array_interface__", None)
    if interface is not None:
        device: int | None = int(tensor.device.id)  # type: ignore[union-attr]
    else:
        interface = getattr(tensor, "__array_interface__", None)
        device = None
    if interface is None:
        raise ReshapeError(f"cannot reshape a {type(tensor).__name__}: give a torch, NumPy or CuPy array")
    if getattr(tensor.dtype, "hasobject", False):
        raise ReshapeError(
            f"cannot reshape an array of dtype {tensor.dtype}: its bytes are references that Python counts; give an "
            "array of numbers, or a uint8 view of its memory"
        )
    addr, read_only = interface["data"]
    if read_only:
        raise ReshapeError("cannot reshape a read-only array in place: give a writable one")
    return _paged(addr, tuple(tensor.shape), memory_strides(tensor), tensor.dtype.itemsize, device)


def memory_strides(tensor: Tensor) -> tuple[int, ...]:
    """Gives the steps of the axes in memory, in the library's own unit."""
    strides = getattr(tensor, "strides", None)
    return tuple(tensor.stride() if strides is None else strides)  # type: ignore[union-attr]


def _paged_torch(tensor: torch.Tensor) -> PagedMemory:
    if tensor.device.type not in {"cpu", "cuda"}:
        raise ReshapeError(f"cannot reshape a tensor on device {tensor.device}: supported are cpu and cuda")
    device = None if tensor.device.type == "cpu" else tensor.device.index
    if str(tensor.layout) != "torch.strided" or tensor.is_nested:
        raise ReshapeError(f"cannot reshape a tensor of layout {tensor.layout}: give a dense one, such as .to_dense()")
    item = tensor.element_size()
    strides = tuple(step * item for step in tensor.stride())
    return _paged(tensor.data_ptr(), tuple(tensor.shape), strides, item, device)


def _paged(
    addr: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, device: int | None
) -> PagedMemory:
    if not shape:
        raise ReshapeError("cannot reshape a tensor without axes: axis 0 must count the pages")
    nbytes = itemsize
    for stride, size in sorted(zip(strides[1:], shape[1:], strict=True)):
        if size == 1:
            continue
        if stride != nbytes:
            raise ReshapeError(
                f"pages must be dense to be reshaped: shape {shape} with strides {strides} bytes has "
                f"an axis of {size} with stride {stride} where {nbytes} is expected; view it so that axis 0 "
                f"counts dense runs"
            )
        nbytes *= size
    stride = strides[0] if shape[0] > 1 else nbytes
    return PagedMemory(addr, stride, shape[0], nbytes, device)


def page_indices(pages: Pages, num_pages: int) -> NDArray[np.int64]:
    """Checks page numbers held by the host and gives them as int64.

    Raises:
        ReshapeError: not a flat list of integers, out of range, or a page is listed twice (it would be
            reshaped twice).
    """
    try:
        indices = np.asarray(pages)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ReshapeError(f"pages must be a flat list of integers on the host: {error}") from None
    if indices.size == 0:
        return np.empty(0, np.int64)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise ReshapeError(f"pages must be a flat list of integers, got shape {indices.shape} of {indices.dtype}")
    indices = indices.astype(np.int64, copy=False)
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= num_pages:
        raise ReshapeError(f"page {low if low < 0 else high} is outside 0..{num_pages - 1}")
    ordered = np.sort(indices)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise ReshapeError(f"page {int(twice[0])} is listed twice and would be reshaped twice: list it once")
    return indices
