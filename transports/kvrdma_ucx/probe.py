"""One UCX opened with the settings of the environment, reading from itself: ``python -m kvrdma_ucx.probe``.

A process of its own for each set of settings: UCX reads them once.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from kvrdma.errors import KVRDMAError
from kvrdma.transport import Device, ReadDone, poll_until
from kvrdma_ucx.transport import UcxTransport

_NBYTES = 64 << 10
_READ_S = 10.0


def probe(*, read: bool) -> dict[str, Any]:
    """Open UCX, say what it found, and read 64 KiB between two of its workers."""
    transport = UcxTransport()
    try:
        result: dict[str, Any] = dict(transport.capabilities().details)
        return result | (_read(transport) if read else {})
    finally:
        transport.close()


def _read(reader: UcxTransport) -> dict[str, Any]:
    target = UcxTransport()
    try:
        source, sink = np.arange(_NBYTES, dtype=np.uint8), np.zeros(_NBYTES, np.uint8)
        region = target.register(source.ctypes.data, _NBYTES, Device())
        reader.register(sink.ctypes.data, _NBYTES, Device())
        peer = reader.connect(target.address(), [region.key])
        rows = np.array([[sink.ctypes.data, 0, 0, _NBYTES]], np.uint64)
        ended = poll_until(reader, reader.read(peer, rows), _READ_S)[-1]
        if not isinstance(ended, ReadDone):
            return {"error": str(ended.reason)}
        return {"via": peer.via, "one_sided": peer.one_sided, "right": bool((source == sink).all())}
    finally:
        target.close()


def main() -> None:
    """Print one JSON object."""
    try:
        result = probe(read="--read" in sys.argv)
    except KVRDMAError as error:
        result = {"error": str(error)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
