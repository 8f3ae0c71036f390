"""The standard streams of a command, whatever whoever started it has made of them."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Heedless(io.RawIOBase):
    """Writes to stderr; what cannot be written there is lost, and nothing else: no result, no exit code."""

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - whatever has bytes
        """Write all of it, if that can be."""
        left = memoryview(data).cast("B")
        nbytes = len(left)
        try:
            while left:
                left = left[os.write(self.fileno(), left) :]
        except OSError:  # closed, full, or its reader has gone
            pass
        return nbytes

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """Give the number of stderr."""
        return 2

    def isatty(self) -> bool:
        """Say whether it is a terminal."""
        try:
            return os.isatty(2)
        except OSError:
            return False


def open_streams() -> None:
    """Make up for standard streams that are closed, and let messages to stderr never fail; to the end of the process.

    Streams that something else has put in their place, as tests do, stay as they are.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one, before a socket does
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - to the end of the process
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
        sys.stderr = io.TextIOWrapper(_Heedless(), encoding, "backslashreplace", write_through=True)
