"""The last step of a plan: join adjacent rows, and check both ends of every row against its region."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvrdma.errors import PlanError
from kvrdma.layout import Storage
from kvrdma.rows import LENGTH, LOCAL, OFFSET, REGION, Rows


def join_rows(rows: Rows, local: Sequence[Storage]) -> Rows:
    """Join rows that are adjacent on both sides, ordered by local address, never across local regions.

    Args:
        rows: ``(N, 4)`` uint64.
        local: regions of this rank; separate allocations may touch one another.
    """
    if len(rows) < 2:
        return rows
    addr = np.ascontiguousarray(rows[:, LOCAL])
    if (addr[1:] < addr[:-1]).any():
        order = np.argsort(addr, kind="stable")
        rows, addr = rows[order], addr[order]
    end = addr + rows[:, LENGTH]
    joins = addr[1:] == end[:-1]
    if not joins.any():
        return rows
    joins &= rows[1:, REGION] == rows[:-1, REGION]
    joins &= rows[1:, OFFSET] == rows[:-1, OFFSET] + rows[:-1, LENGTH]
    if len(local) > 1:
        joins &= ~np.isin(addr[1:], np.array([region.addr for region in local], np.uint64))
    if not joins.any():
        return rows
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    merged = rows[starts]
    merged[:, LENGTH] = np.add.reduceat(rows[:, LENGTH], starts)
    return merged


def check_bounds(rows: Rows, local: Sequence[Storage], remote: Sequence[Storage]) -> None:
    """Refuse rows that leave a local or a remote region.

    Raises:
        PlanError: names the first bad row, its values and the region.
    """
    if not len(rows):
        return
    length, region = rows[:, LENGTH], rows[:, REGION]
    if int(region.max()) >= len(remote):
        bad = int(np.argmax(region >= len(remote)))
        raise PlanError(f"row {bad} {tuple(rows[bad].tolist())}: the peer has only {len(remote)} regions")
    sizes = np.array([storage.nbytes for storage in remote], np.uint64)
    nbytes = sizes[region.astype(np.int64)] if len(remote) > 1 else sizes
    _refuse(rows, (rows[:, OFFSET] > nbytes) | (length > nbytes - rows[:, OFFSET]), "remote")
    ordered = sorted(local, key=lambda storage: storage.addr)
    starts = np.array([storage.addr for storage in ordered], np.uint64)
    ends = np.maximum.accumulate(np.array([storage.addr + storage.nbytes for storage in ordered], np.uint64))
    index = np.searchsorted(starts, rows[:, LOCAL], side="right") - 1 if len(local) > 1 else np.zeros(1, int)
    start, end = starts[index], ends[index]  # the region that reaches furthest: storages may lie inside one another
    outside = (index < 0) | (rows[:, LOCAL] < start) | (rows[:, LOCAL] > end) | (length > end - rows[:, LOCAL])
    _refuse(rows, outside, "local")


def _refuse(rows: Rows, wrong: npt.NDArray[np.bool_], side: str) -> None:
    if wrong.any():
        bad = int(np.argmax(wrong))
        addr, region, offset, length = rows[bad].tolist()
        raise PlanError(
            f"row {bad} (local {addr:#x}, region {region}, offset {offset}, length {length}) leaves its "
            f"{side} region: the block ids do not belong to the layouts of this pair"
        )
