"""Rows: what a read moves, as one array, and the pure functions on it.

A *row* is ``(local address, remote region index, remote offset, length)``. A batch of rows is a C-contiguous
``(N, 4)`` uint64 array, so that one call crosses into a transport however many pieces a request has, or, where the same
pages are read in every layer, a few small arrays that stand for it (``RowGrids``). The functions here are the readable
definition; native transports do the same in C++.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvrdma.errors import RowsError

Rows: TypeAlias = npt.NDArray[np.uint64]

LOCAL, REGION, OFFSET, LENGTH = range(4)

RowTable: TypeAlias = Rows | memoryview
"""Rows as an array, or as ``pack_rows`` makes them."""

_MAX_ROWS = 1 << 31
_UINT64 = np.dtype(np.uint64)
_ORIGIN: Rows = np.zeros((1, 4), np.uint64)


def pack_rows(numbers: Sequence[int]) -> memoryview:
    """Put rows into memory without NumPy, whose functions cost some 20 us each where they are in no cache.

    Args:
        numbers: four for each row, one at least; modulo 2**64 from ``[-(2**63), 2**63)``.

    Raises:
        RowsError: another count of them.
    """
    if not numbers or len(numbers) % 4:
        raise RowsError(f"{len(numbers)} numbers are no rows to pack: need four for each, and one row at least")
    return memoryview(array("q", numbers).tobytes()).cast("Q", (len(numbers) // 4, 4))


class Grid(NamedTuple):
    """Rows not written out: ``base + page * scale + cell`` for every one of each, field by field, modulo 2**64.

    Attributes:
        bases: ``(B, 4)`` uint64, such as where each layer starts.
        cells: ``(C, 4)`` uint64, such as the rows of a page.
        pages: ``(P, 4)`` uint64, such as the numbers of a page on both sides.
        scale: ``(1, 4)`` uint64, such as the sizes of a page.
    """

    bases: RowTable
    cells: RowTable
    pages: RowTable = _ORIGIN
    scale: RowTable = _ORIGIN


class RowGrids:
    """A batch of ``B * P * C`` rows for each of its grids: cells run fastest, bases slowest."""

    __slots__ = ("_count", "grids")

    def __init__(self, grids: Iterable[Grid], *, as_they_are: bool = False) -> None:
        """Take grids of tables that ``as_rows`` takes.

        Args:
            grids: these.
            as_they_are: ``as_rows`` or ``pack_rows`` has made their tables: they need no look.

        Raises:
            RowsError: as ``as_rows``, another scale than one row, or over 2**31 rows.
        """
        if not isinstance(grids, Iterable):
            raise RowsError(f"a batch of grids holds no grids but is a {type(grids).__name__}: need several Grid")
        self.grids = tuple(grids if as_they_are else map(_checked, grids))
        self._count = _count_rows(self.grids)

    def __len__(self) -> int:
        """Count the rows."""
        return self._count

    def expand(self) -> Rows:
        """Write the rows out.

        Raises:
            RowsError: the tables have grown since, to over 2**31 rows.
        """
        _count_rows(self.grids)
        parts = [np.empty((0, 4), np.uint64)]
        for bases, cells, pages, scale in (map(as_rows, grid) for grid in self.grids):
            parts.append((bases[:, None, None] + (pages * scale)[:, None] + cells).reshape(-1, 4))
        return np.concatenate(parts)


Batch: TypeAlias = RowTable | RowGrids


def _count_rows(grids: Iterable[Grid]) -> int:
    count = 0
    for bases, cells, pages, _ in grids:
        count += len(bases) * len(cells) * len(pages)
    if count > _MAX_ROWS:
        raise RowsError(f"the grids have {count} rows: one batch holds at most {_MAX_ROWS}")
    return count


def _checked(grid: Grid) -> Grid:
    if not isinstance(grid, Grid):
        raise RowsError(f"a batch of grids holds a {type(grid).__name__}: need kvrdma.rows.Grid")
    tables = Grid(*map(_table, grid))
    if len(tables.scale) != 1:
        raise RowsError(f"the scale of a grid is one row, not {len(tables.scale)}")
    return tables


def grids_of(rows: Batch | Iterable[Sequence[int]]) -> tuple[tuple[Rows, Rows, Rows, Rows], ...]:
    """Give a batch in the form in which native transports take it: to them, a memoryview is as good as an array.

    Raises:
        RowsError: as ``as_rows``.
    """
    if isinstance(rows, RowGrids):
        return rows.grids  # type: ignore[return-value]
    return ((_ORIGIN, _table(rows), _ORIGIN, _ORIGIN),)  # type: ignore[return-value]


def _table(rows: RowTable | Iterable[Sequence[int]]) -> RowTable:
    try:
        if type(rows) is memoryview and (rows.format, rows.ndim, rows.nbytes) == ("Q", 2, 32 * len(rows)):
            return rows if rows.c_contiguous else as_rows(rows)
    except ValueError as error:  # it was released
        raise RowsError(f"rows are a memoryview that cannot be read: {error}") from None
    return as_rows(rows)


def as_rows(rows: Batch | Iterable[Sequence[int]]) -> Rows:
    """Turn rows into the array that stands for a batch; refuse anything that would lose a value.

    Args:
        rows: an ``(N, 4)`` integer array or a sequence of 4-tuples, all values in ``[0, 2**64)``; grids, or
            memory that holds rows.

    Returns:
        A C-contiguous ``(N, 4)`` uint64 array; the input itself where it is one already.

    Raises:
        RowsError: wrong shape, a non-integer dtype or a negative value.
    """
    if isinstance(rows, RowGrids):
        return rows.expand()
    if isinstance(rows, memoryview):
        rows = np.asarray(rows)
    if isinstance(rows, np.ndarray) and rows.dtype == _UINT64 and rows.flags.c_contiguous and rows.shape[1:] == (4,):
        return rows
    return _converted(rows)


def _converted(rows: npt.NDArray[Any] | Iterable[Sequence[int]]) -> Rows:
    # By way of objects: numpy turns a list that mixes values below and above 2**63 into floats.
    if not isinstance(rows, np.ndarray | Iterable):
        raise RowsError(f"rows are a {type(rows).__name__}: need an array or a sequence of rows")
    given = rows if isinstance(rows, np.ndarray) else np.array(list(rows), dtype=object)
    if given.shape in {(0,), (0, 4)}:
        return np.empty((0, 4), np.uint64)
    if given.ndim != 2 or given.shape[1] != 4:
        raise RowsError(f"rows have shape {given.shape}: need (N, 4), one (local addr, region, offset, length) each")
    if given.dtype.kind == "O" and not all(isinstance(value, int | np.integer) for value in given.flat):
        raise RowsError(f"rows hold something other than integers: {given.tolist()[0]!r}, ...")
    if given.dtype.kind not in "uiO":
        raise RowsError(f"rows have dtype {given.dtype}: need uint64")
    if given.dtype.kind != "u":
        outside = np.argwhere(((given < 0) | (given > np.uint64(2**64 - 1))).any(axis=1))
        if len(outside):
            first = int(outside[0, 0])
            raise RowsError(f"row {first} {tuple(given[first].tolist())} has a value outside [0, 2**64)")
    return np.ascontiguousarray(given, dtype=np.uint64)


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
