"""Reshapes pages in host memory with one page of scratch.

NumPy moves the bytes, also those of torch tensors: its opaque items of any size make every element one
memory move, and a call costs a third of a torch operation, so one page at a time stays in the cache.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvrdma.reshape.pages import PagedMemory
    from kvrdma.reshape.spec import Reshape

NATIVE_NBYTES = (16, 8, 4, 2, 1)
BATCH = 64


def apply_cpu(reshape: Reshape, memory: PagedMemory, pages: NDArray[np.int64]) -> None:
    """Applies ``reshape`` in place to the given pages of host memory.

    Allocates one page of scratch. ``pages`` are valid and distinct (see ``page_indices``).
    """
    movement = reshape.collapsed()
    dtype = _dtype(movement.itemsize)
    held = (memory.num_pages - 1) * memory.page_stride + memory.page_nbytes
    buffer = memoryview((ctypes.c_ubyte * held).from_address(memory.addr))

    units = (movement.count,) if movement.count > 1 else ()
    steps = (movement.stride,) if movement.count > 1 else ()

    def view(shape: tuple[int, ...]) -> NDArray[np.generic]:
        inner = [movement.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
        sizes, strides = (memory.num_pages, *units, *shape), (memory.page_stride, *steps, *inner)
        return np.ndarray(sizes, dtype, buffer, movement.offset, strides)

    landed, final = view(movement.shape), view(movement.result_shape)
    scratch = np.empty((*units, *movement.shape), dtype)
    permuted = scratch.transpose(*range(len(units)), *(a + len(units) for a in movement.axes))
    for start in range(0, len(pages), BATCH):
        for page in pages[start : start + BATCH].tolist():  # a list of all numbers could outweigh the pages
            scratch[...] = landed[page]
            final[page] = permuted


def _dtype(itemsize: int) -> np.dtype[np.generic]:
    """Gives a type NumPy copies without looking inside, as wide as the element."""
    if itemsize in NATIVE_NBYTES:
        return np.dtype("complex128" if itemsize == NATIVE_NBYTES[0] else f"u{itemsize}")
    return np.dtype(f"V{itemsize}")
