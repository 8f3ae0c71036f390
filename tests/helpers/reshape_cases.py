"""Reshapes that every kernel is run on, with the reason each one is here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrdma.reshape import PagedMemory, Reshape
from kvrdma.reshape.reference import apply_reference

CASES = {
    "block ratio": Reshape((4, 8, 16, 64), (1, 0, 2, 3), 2),
    "block ratio, head slices": Reshape((8, 8, 16, 128), (1, 0, 2, 3), 2),
    "token-major": Reshape((2, 4, 16, 64), (0, 2, 1, 3), 2),
    "token-major, sliced": Reshape((4, 8, 32, 256), (0, 2, 1, 3), 2),
    "token-major, odd tokens": Reshape((3, 5, 7, 24), (0, 2, 1, 3), 2),
    "source ranks": Reshape((4, 32, 2, 64), (1, 0, 2, 3), 2),
    "dcp interleave": Reshape((4, 8, 2, 144), (1, 0, 2, 3), 4),
    "cpu keys": Reshape((2, 64, 32), (1, 0, 2), 2, offset=0, stride=2 * 64 * 64 * 2, count=3),
    "656-byte tokens": Reshape((4, 16), (1, 0), 656),
    "656-byte tokens, sliced": Reshape((64, 64), (1, 0), 656),
    "odd bytes": Reshape((3, 5, 7), (2, 0, 1), 13, offset=3),
    "one byte": Reshape((16, 24), (1, 0), 1),
    "two bytes": Reshape((64, 96), (1, 0), 2),
    "four bytes": Reshape((5, 7, 4), (2, 1, 0), 4),
    "eight bytes": Reshape((6, 10), (1, 0), 8),
    "sixteen bytes": Reshape((9, 11), (1, 0), 16, offset=16, stride=2000, count=2),
    "units between aligned places": Reshape((4, 8), (1, 0), 16, stride=520, count=3),
    "many axes": Reshape((2, 3, 2, 5, 4), (3, 1, 4, 0, 2), 6),
    "cycles": Reshape((241, 211), (1, 0), 2),
    "cycles, fixed axis": Reshape((2, 130, 97), (0, 2, 1), 16),
    "cycles, odd bytes": Reshape((300, 350), (1, 0), 3),
    "identity": Reshape((2, 1, 8), (1, 0, 2), 4),
}


@dataclass
class PagePool:
    """Random pages in host memory with gaps between them and a base shifted from its alignment."""

    num_pages: int
    page_nbytes: int
    gap: int = 0
    shift: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        stride = self.page_nbytes + self.gap
        held = self.num_pages * stride - self.gap + self.shift
        room = np.random.default_rng(self.seed).integers(0, 256, held + 256, dtype=np.uint8)
        start = -room.ctypes.data % 256 + self.shift
        self.whole: NDArray[np.uint8] = room
        self.pages: NDArray[np.uint8] = np.lib.stride_tricks.as_strided(
            room[start:], (self.num_pages, self.page_nbytes), (stride, 1)
        )

    def memory(self, device: int | None) -> PagedMemory:
        stride = self.page_nbytes + self.gap
        return PagedMemory(self.pages.ctypes.data, stride, self.num_pages, self.page_nbytes, device)

    def expected(self, reshape: Reshape, indices: list[int]) -> NDArray[np.uint8]:
        """Gives the whole buffer, gaps included, as it must be afterwards."""
        moved = apply_reference(reshape, self.pages, indices)
        kept = self.whole.copy()
        start = self.pages.ctypes.data - self.whole.ctypes.data
        for page in range(self.num_pages):
            first = start + page * (self.page_nbytes + self.gap)
            kept[first : first + self.page_nbytes] = moved[page]
        return kept
