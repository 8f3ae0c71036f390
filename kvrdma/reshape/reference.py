"""The slow and obvious reshape that every kernel is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvrdma.reshape.spec import Reshape


def apply_reference(reshape: Reshape, pages: NDArray[np.uint8], indices: Iterable[int]) -> NDArray[np.uint8]:
    """Gives a copy of ``pages`` (uint8 ``[pages, page_nbytes]``) with the listed ones reshaped."""
    result = pages.copy()
    for index in indices:
        for unit in range(reshape.count):
            start = reshape.offset + unit * reshape.stride
            piece = pages[index, start : start + reshape.nbytes]
            elements = piece.reshape(*reshape.shape, reshape.itemsize)
            moved = np.transpose(elements, (*reshape.axes, len(reshape.shape)))
            result[index, start : start + reshape.nbytes] = moved.ravel()
    return result
