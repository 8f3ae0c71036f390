"""What the commands of the benchmarks share: counts as options, errors told in a line, processes that may not start."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from kvrdma.errors import KVRDMAError

_END_S = 5.0


def count(text: str) -> int:
    """Read a number of things, of which there must be one.

    Raises:
        ArgumentTypeError: it is none.
    """
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")


@contextlib.contextmanager
def errors_told(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End the program with one line where what it uses refuses something."""
    try:
        yield
    except KVRDMAError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


def answer_of(process: BaseProcess, pipe: Connection, timeout_s: float, who: str) -> Any:  # noqa: ANN401 - pickled
    """Give what a process says next.

    Raises:
        TimeoutError: it says nothing in time.
        RuntimeError: it has ended; the reason is on its error output.
    """
    ready = wait((pipe, process.sentinel), timeout_s)
    if pipe.poll():
        return pipe.recv()
    if not ready:
        raise TimeoutError(f"{who} does not answer within {timeout_s:g} s")
    process.join(_END_S)  # its descriptors are closed a moment before it has an exit code
    raise RuntimeError(f"{who} has ended with exit code {process.exitcode}; what it said is above")
