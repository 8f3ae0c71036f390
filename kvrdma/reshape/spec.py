"""The description of one in-place transpose of cache pages, shared by the planner and the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvrdma.errors import ReshapeError


@dataclass(frozen=True, slots=True)
class Reshape:
    """Says how the bytes of a page that landed in wire order become the page the engine expects.

    The unit is a whole page or an equal part of one. Every unit becomes, in place,
    ``unit.reshape(shape).transpose(axes)``: output axis ``i`` is input axis ``axes[i]``.
    Raises ``ReshapeError`` when the fields contradict one another.

    Attributes:
        shape: sizes of the unit's axes in the order in which its bytes landed.
        axes: a permutation of ``range(len(shape))``.
        itemsize: bytes of one element, any positive number (656 for a packed MLA token).
        offset: bytes from the start of the page to its first unit.
        stride: bytes from one unit of a page to the next; unused while ``count`` is 1.
        count: units in each page.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    itemsize: int
    offset: int = 0
    stride: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not self.shape or any(n < 1 for n in self.shape):
            raise ReshapeError(f"reshape shape must hold sizes of at least 1, got {self.shape}")
        if sorted(self.axes) != list(range(len(self.shape))):
            raise ReshapeError(
                f"reshape axes must be a permutation of 0..{len(self.shape) - 1} for shape {self.shape}, "
                f"got {self.axes}"
            )
        if self.itemsize < 1 or self.count < 1 or self.offset < 0:
            raise ReshapeError(
                f"reshape needs itemsize >= 1, count >= 1, offset >= 0, got itemsize {self.itemsize}, "
                f"count {self.count}, offset {self.offset}"
            )
        if self.count > 1 and self.stride < self.nbytes:
            raise ReshapeError(
                f"reshape units overlap: stride {self.stride} bytes is less than the {self.nbytes} bytes of "
                f"a unit of shape {self.shape} x {self.itemsize} bytes"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of one unit."""
        return math.prod(self.shape) * self.itemsize

    @property
    def page_nbytes(self) -> int:
        """Bytes from the start of a page to the end of its last unit: what a page must hold."""
        return self.offset + (self.count - 1) * self.stride + self.nbytes

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Sizes of the axes after the transpose."""
        return tuple(self.shape[a] for a in self.axes)

    @property
    def is_identity(self) -> bool:
        """Whether every byte is already where it belongs."""
        return self.collapsed().axes == (0,)

    def collapsed(self) -> Reshape:
        """Gives the same movement with as few axes and as wide elements as possible.

        Axes of size 1 vanish, axes that stay neighbours are merged, and a last axis that stays last
        becomes part of the element. The identity is ``shape (1,)``.
        """
        order = [a for a in self.axes if self.shape[a] > 1]
        runs: list[list[int]] = []
        for a in order:
            between = self.shape[runs[-1][-1] + 1 : a] if runs else ()
            if runs and runs[-1][-1] < a and all(n == 1 for n in between):
                runs[-1].append(a)
            else:
                runs.append([a])
        sources = sorted(runs)
        shape = [math.prod(self.shape[a] for a in run) for run in sources]
        axes = [sources.index(run) for run in runs]
        itemsize = self.itemsize
        if axes and axes[-1] == len(axes) - 1:
            itemsize *= shape.pop()
            axes.pop()
        if not axes:
            shape, axes = [1], [0]
        return replace(self, shape=tuple(shape), axes=tuple(axes), itemsize=itemsize)
