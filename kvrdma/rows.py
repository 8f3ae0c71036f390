"""Rows: what a read moves, as one array, and the pure functions on it.

A *row* is ``(local address, remote region index, remote offset, length)``. A batch of rows is a C-contiguous
``(N, 4)`` uint64 array, so that one call crosses into a transport however many pieces a request has. The
functions here are the readable definition; native transports do the same in C++.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvrdma.errors import RowsError

Rows: TypeAlias = npt.NDArray[np.uint64]

LOCAL, REGION, OFFSET, LENGTH = range(4)


def as_rows(rows: Rows | Iterable[Sequence[int]]) -> Rows:
    """Turn rows into the array every transport takes; refuse anything that would lose a value.

    Args:
        rows: an ``(N, 4)`` integer array or a sequence of 4-tuples, all values in ``[0, 2**64)``.

    Returns:
        A C-contiguous ``(N, 4)`` uint64 array; the input itself where it is one already.

    Raises:
        RowsError: wrong shape, a non-integer dtype or a negative value.
    """
    # By way of objects: numpy turns a list that mixes values below and above 2**63 into floats.
    if not isinstance(rows, np.ndarray | Iterable):
        raise RowsError(f"rows are a {type(rows).__name__}: need an array or a sequence of rows")
    array = rows if isinstance(rows, np.ndarray) else np.array(list(rows), dtype=object)
    if array.shape in {(0,), (0, 4)}:
        return np.empty((0, 4), np.uint64)
    if array.ndim != 2 or array.shape[1] != 4:
        raise RowsError(f"rows have shape {array.shape}: need (N, 4), one (local addr, region, offset, length) each")
    if array.dtype.kind == "O" and not all(isinstance(value, int | np.integer) for value in array.flat):
        raise RowsError(f"rows hold something other than integers: {array.tolist()[0]!r}, ...")
    if array.dtype.kind not in "uiO":
        raise RowsError(f"rows have dtype {array.dtype}: need uint64")
    if array.dtype.kind != "u":
        outside = np.argwhere(((array < 0) | (array > np.uint64(2**64 - 1))).any(axis=1))
        if len(outside):
            first = int(outside[0, 0])
            raise RowsError(f"row {first} {tuple(array[first].tolist())} has a value outside [0, 2**64)")
    return np.ascontiguousarray(array, dtype=np.uint64)


def check_rows(rows: Rows, local: Sequence[tuple[int, int]], remote_nbytes: Sequence[int]) -> None:
    """Refuse the batch if any row leaves its local region or its remote region.

    Args:
        rows: ``(N, 4)`` uint64.
        local: ``(addr, nbytes)`` of every region registered here; they may overlap.
        remote_nbytes: size in bytes of each remote region, by region index.

    Raises:
        RowsError: names the first bad row, its values and the bound it breaks.
    """
    for i, (addr, region, offset, length) in enumerate(rows.tolist()):
        where = f"row {i} (local {addr:#x}, region {region}, offset {offset}, length {length})"
        if region >= len(remote_nbytes):
            raise RowsError(f"{where}: the peer has {len(remote_nbytes)} regions; no region {region}")
        if offset + length > remote_nbytes[region]:
            raise RowsError(
                f"{where}: ends at byte {offset + length} of a remote region of {remote_nbytes[region]} bytes"
            )
        if not any(start <= addr and addr + length <= start + nbytes for start, nbytes in local):
            raise RowsError(f"{where}: [{addr:#x}, {addr + length:#x}) is in no region registered here")


def merge_rows(rows: Rows) -> Rows:
    """Join rows that are adjacent on both sides, in whatever order they come.

    Args:
        rows: ``(N, 4)`` uint64. Rows of length 0 are dropped.

    Returns:
        ``(M, 4)`` uint64, ``M <= N``, ordered by (region, offset).
    """
    rows = rows[rows[:, LENGTH] > 0]
    rows = rows[np.lexsort((rows[:, OFFSET], rows[:, REGION]))]
    if len(rows) < 2:
        return rows
    before, after = rows[:-1], rows[1:]
    joins = (
        (before[:, REGION] == after[:, REGION])
        & (before[:, OFFSET] + before[:, LENGTH] == after[:, OFFSET])
        & (before[:, LOCAL] + before[:, LENGTH] == after[:, LOCAL])
    )
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    merged = rows[starts]
    merged[:, LENGTH] = np.add.reduceat(rows[:, LENGTH], starts)
    return merged
