"""``verify="digest"``: checksums made by the producer's CPU, compared with what has landed. For debugging links."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrdma.engine.links import Ask
from kvrdma.errors import DataError, MessageError
from kvrdma.layout import KVLayout
from kvrdma.rows import LENGTH, LOCAL, Rows
from kvrdma.wire import DigestRows, RowDigests

if TYPE_CHECKING:
    from kvrdma.engine.pull import Pull

_ROWS_PER_MESSAGE = 16_384
_ROW_NBYTES = 24


def digests_of(addresses: Iterator[tuple[int, int]]) -> npt.NDArray[np.uint32]:
    """CRC-32 of each ``(address, length)`` of this process's host memory."""
    return np.array([zlib.crc32((ctypes.c_char * length).from_address(addr)) for addr, length in addresses], np.uint32)


def compare_digests(ask: Ask, pull: Pull) -> DataError | None:
    """Compare every row of a landed pull with the producer's bytes. Blocks.

    Returns:
        How they differ, if they do: by fault of the link, or because the lease has ended and its blocks are used again.

    Raises:
        ControlError: the producer gives no checksums.
    """
    assert pull.peer
    assert pull.plan
    lease = (pull.wanted.reference.lease.slot, pull.wanted.reference.lease.generation)
    for link, source in zip(pull.peer.links, pull.plan.sources, strict=True):
        every = source.rows
        for start in range(0, len(every), _ROWS_PER_MESSAGE):
            rows = every[start : start + _ROWS_PER_MESSAGE]
            reply = ask(link.mailbox, DigestRows(lease, rows[:, 1:].tobytes()))
            if not isinstance(reply, RowDigests) or len(reply.digests) != 4 * len(rows):
                raise MessageError(f"{link.mailbox} sent no checksums for {len(rows)} rows")
            differs = _check(rows, np.frombuffer(reply.digests, "<u4"), f"rank {tuple(link.rank)} by {link.via}")
            if differs is not None:
                return differs
    return None


def answer_digests(layout: KVLayout, rows: bytes) -> RowDigests:
    """Make the checksums of rows of this rank, which ``layout`` describes.

    Raises:
        MessageError: a row lies outside the regions.
    """
    if len(rows) % _ROW_NBYTES:
        raise MessageError(f"{len(rows)} bytes of rows: need {_ROW_NBYTES} each")
    places: list[tuple[int, int]] = []
    for region, offset, length in np.frombuffer(rows, "<u8").reshape(-1, 3).tolist():
        nbytes = layout.regions[region].nbytes if region < len(layout.regions) else 0
        if offset + length > nbytes:
            raise MessageError(
                f"no bytes {offset} to {offset + length} of region {region}, which has {nbytes}, of "
                f"{len(layout.regions)} regions: another layout than this rank's was read; use the same kvrdma on both"
            )
        places.append((layout.regions[region].addr + offset, length))
    return RowDigests(digests_of(iter(places)).astype("<u4").tobytes())


def _check(rows: Rows, theirs: npt.NDArray[np.uint32], where: str) -> DataError | None:
    ours = digests_of(zip(rows[:, LOCAL].tolist(), rows[:, LENGTH].tolist(), strict=True))
    wrong = np.flatnonzero(ours != theirs)
    if not wrong.size:
        return None
    row = rows[wrong[0]].tolist()
    return DataError(
        f"{wrong.size} of {len(rows)} rows from {where} differ from the producer's bytes, the first: local "
        f"{row[0]:#x}, region {row[1]}, offset {row[2]}, length {row[3]}: CRC {ours[wrong[0]]:08x} here, "
        f"{theirs[wrong[0]]:08x} there; the link or its memory is at fault"
    )
