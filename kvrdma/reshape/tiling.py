"""Decides how the CUDA kernel cuts a reshape into tiles and which index table it follows; pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from kvrdma.errors import ReshapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvrdma.reshape.spec import Reshape

KERNEL = "kvrdma_reshape"
THREADS = 256
TILE_NBYTES = 32 << 10  # several blocks share an SM, so that one loads while another stores
STATIC_SHARED_NBYTES = 48 << 10  # dynamic shared memory a kernel gets without opting in to more
ROW_NBYTES = 128  # the kernel's swizzle works in rows of this size; also a full cache line
VECTOR_NBYTES = 16
MAX_CYCLE_BLOCKS = 64
MAX_UNIT_NBYTES = (1 << 31) - 1  # the kernel counts bytes inside a unit in 32 bits


@dataclass(frozen=True, slots=True)
class Tiling:
    """The numbers the kernel takes after its addresses, in the kernel's order, and its launch size.

    Attributes:
        groups: independent sub-units of a unit; each has ``elements`` elements of ``element_nbytes``.
        slice_nbytes: bytes of each element that one CUDA block moves; the last slice may be shorter.
        slices: CUDA blocks per sub-unit.
        vector: bytes of a global access, 16 or ``piece``.
        piece: bytes that surely stay together, the widest power of two up to 16.
        cycles: 0 for tiles in shared memory, otherwise how many cycles threads follow in place.
        shared_nbytes: dynamic shared memory of a block.
    """

    groups: int
    elements: int
    element_nbytes: int
    slice_nbytes: int
    slices: int
    vector: int
    piece: int
    cycles: int
    shared_nbytes: int

    def arguments(self) -> tuple[np.uint32, ...]:
        """Gives the kernel's last arguments, ``groups`` to ``cycles``."""
        return tuple(np.uint32(getattr(self, f.name)) for f in fields(self)[:-1])


def plan_tiling(reshape: Reshape, alignment: int, shared_limit: int) -> tuple[Tiling, NDArray[np.int32]]:
    """Cuts ``reshape`` into tiles of at most ``shared_limit`` bytes.

    Args:
        reshape: not an identity.
        alignment: bytes that divide the address of every unit.
        shared_limit: bytes of shared memory a block may have on the device.

    Returns:
        The tiling and its index table, int32: the element read for each element written; in cycle mode
        followed by the first element of every cycle.

    Raises:
        ReshapeError: a unit is 2 GiB or larger.
    """
    _require_size(reshape)
    movement = reshape.collapsed()
    fixed, inner = _split_fixed_axis(movement.shape, movement.axes)
    elements = math.prod(inner[0])
    nbytes = movement.itemsize
    piece = math.gcd(VECTOR_NBYTES, alignment, nbytes)
    taken = _slice_nbytes(elements, nbytes, piece, shared_limit)
    if taken == 0:
        return _cycle_tiling(fixed, inner, nbytes, piece)
    together = 1
    if taken == nbytes:
        together = _groups_together(fixed, min(TILE_NBYTES, shared_limit) // (elements * nbytes))
    whole = taken == nbytes and math.gcd(VECTOR_NBYTES, alignment, together * elements * nbytes) == VECTOR_NBYTES
    table = _sources((together, *inner[0]), (0, *(a + 1 for a in inner[1])))
    tiling = Tiling(
        groups=fixed // together,
        elements=together * elements,
        element_nbytes=nbytes,
        slice_nbytes=taken,
        slices=-(-nbytes // taken),
        vector=VECTOR_NBYTES if whole else piece,
        piece=piece,
        cycles=0,
        shared_nbytes=_round_up(together * elements * taken, ROW_NBYTES),
    )
    return tiling, table


def _require_size(reshape: Reshape) -> None:
    if reshape.nbytes > MAX_UNIT_NBYTES:
        raise ReshapeError(
            f"a unit of shape {reshape.shape} x {reshape.itemsize} bytes has {reshape.nbytes} bytes and the "
            f"kernel takes at most {MAX_UNIT_NBYTES}: give it as several units (count, stride)"
        )


def _groups_together(groups: int, most: int) -> int:
    """Finds how many small sub-units to put into one tile: the largest divisor up to ``most``, at least 1."""
    return next((g for g in range(min(groups, most), 1, -1) if groups % g == 0), 1)


def _split_fixed_axis(
    shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Takes off the leading axis if it stays in front: its indices are independent sub-units."""
    if axes[0] != 0:
        return 1, (shape, axes)
    return shape[0], (shape[1:], tuple(a - 1 for a in axes[1:]))


def _slice_nbytes(elements: int, nbytes: int, piece: int, shared_limit: int) -> int:
    """Bytes of each element a tile takes; 0 when not even one piece of each fits in shared memory."""
    best = 0
    for budget in (TILE_NBYTES, STATIC_SHARED_NBYTES, shared_limit // 2, shared_limit):
        if budget > shared_limit:
            continue
        room = budget // ROW_NBYTES * ROW_NBYTES // elements
        step = ROW_NBYTES if room >= ROW_NBYTES else piece
        room = room // step * step
        if room >= nbytes:
            return nbytes
        if room:
            best = max(best, min(room, _round_up(-(-nbytes // -(-nbytes // room)), step)))
        if best >= ROW_NBYTES:
            break
    return best


def _cycle_tiling(
    fixed: int, inner: tuple[tuple[int, ...], tuple[int, ...]], nbytes: int, piece: int
) -> tuple[Tiling, NDArray[np.int32]]:
    sources = _sources(*inner)
    leaders = _cycle_leaders(sources)
    tasks = len(leaders) * (nbytes // piece)
    tiling = Tiling(
        groups=fixed,
        elements=len(sources),
        element_nbytes=nbytes,
        slice_nbytes=nbytes,
        slices=min(MAX_CYCLE_BLOCKS, -(-tasks // THREADS)),
        vector=piece,
        piece=piece,
        cycles=len(leaders),
        shared_nbytes=0,
    )
    return tiling, np.concatenate([sources, leaders])


def _sources(shape: tuple[int, ...], axes: tuple[int, ...]) -> NDArray[np.int32]:
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape).transpose(axes).ravel()


def _cycle_leaders(sources: NDArray[np.int32]) -> NDArray[np.int32]:
    """Finds the smallest element of every cycle longer than one."""
    steps = sources.tolist()
    seen = bytearray(len(steps))
    leaders = []
    for start, source in enumerate(steps):
        if seen[start] or source == start:
            continue
        leaders.append(start)
        at = start
        while not seen[at]:
            seen[at] = 1
            at = steps[at]
    return np.array(leaders, dtype=np.int32)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
