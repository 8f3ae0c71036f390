"""``verify="digest"``: checksums made by the producer's CPU, compared with what has landed. For debugging links."""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvrdma.config import Config
from kvrdma.errors import DataError, KVRDMAError, MessageError
from kvrdma.rows import LENGTH, LOCAL, Rows
from kvrdma.sidechannel import SideChannelClient
from kvrdma.wire import DigestRows, RowDigests

if TYPE_CHECKING:
    from kvrdma.engine.pull import Pull

_ROWS_PER_MESSAGE = 65_536


def digests_of(addresses: Iterator[tuple[int, int]]) -> npt.NDArray[np.uint32]:
    """CRC-32 of each ``(address, length)`` of this process's host memory."""
    return np.array([zlib.crc32((ctypes.c_char * length).from_address(addr)) for addr, length in addresses], np.uint32)


def compare_digests(config: Config, pull: Pull, then: Callable[[KVRDMAError | None], None]) -> None:
    """Compare every row of a landed pull in a thread of its own; ``then`` gets the first difference, or None."""

    def compare() -> None:
        try:
            _compare(config, pull)
        except KVRDMAError as error:
            then(error)
        else:
            then(None)

    threading.Thread(target=compare, name="kvrdma digest", daemon=True).start()


def _compare(config: Config, pull: Pull) -> None:
    assert pull.peer
    assert pull.plan
    lease = (pull.wanted.reference.lease.slot, pull.wanted.reference.lease.generation)
    for link, source in zip(pull.peer.links, pull.plan.sources, strict=True):
        if len(source.rows) == 0:
            continue
        with SideChannelClient(link.mailbox, config.secret) as client:
            for start in range(0, len(source.rows), _ROWS_PER_MESSAGE):
                rows = source.rows[start : start + _ROWS_PER_MESSAGE]
                reply = client.request(DigestRows(lease, rows[:, 1:].tobytes()), config.control_timeout_s)
                if not isinstance(reply, RowDigests) or len(reply.digests) != 4 * len(rows):
                    raise MessageError(f"{link.mailbox} sent no checksums for {len(rows)} rows")
                _check(rows, np.frombuffer(reply.digests, "<u4"), f"rank {tuple(link.rank)} by {link.via}")


def _check(rows: Rows, theirs: npt.NDArray[np.uint32], where: str) -> None:
    ours = digests_of(zip(rows[:, LOCAL].tolist(), rows[:, LENGTH].tolist(), strict=True))
    wrong = np.flatnonzero(ours != theirs)
    if wrong.size:
        row = rows[wrong[0]].tolist()
        raise DataError(
            f"{wrong.size} of {len(rows)} rows from {where} differ from the producer's bytes, the first: local "
            f"{row[0]:#x}, region {row[1]}, offset {row[2]}, length {row[3]}: CRC {ours[wrong[0]]:08x} here, "
            f"{theirs[wrong[0]]:08x} there; the link or its memory is at fault"
        )
