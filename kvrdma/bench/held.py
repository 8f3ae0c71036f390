"""How long `read()` holds its caller, beside a bare copy of the rows: `python -m kvrdma.bench.held`.

Both touch the same memory, the array of rows and one as long, and both wait for it where it is cold: after a rest, or
when other work has driven it out of the caches. Beside them stands what it takes to touch a page of memory that nobody
has touched for as long: tens of ns where the memory is the machine's own, microseconds in a virtual machine whose host
lets go of what rests. Prints one JSON object per rest, medians in ns per row and per page.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np

from kvrdma.bench.command import count
from kvrdma.bench.patterns import Case, Shape, rows_of
from kvrdma.bench.reading import best_transport
from kvrdma.transport import Device, open_transport, poll_until

_RESTS_S = (0.0, 0.03, 0.2, 1.0)
_DEADLINE_S = 60.0
_PAGES = 1024


def held(transport: str, nrows: int, block_bytes: int, iters: int) -> Iterator[dict[str, object]]:
    """Read ``nrows`` fragmented rows by a transport of this process from another of it, ``iters`` times per rest.

    Yields:
        ``rest_s`` before each read, ``held_ns_per_row`` and, from as many rounds between them, ``copy_ns_per_row`` and
        ``touch_ns_per_page``.
    """
    case = Case("fragmented", Shape(1, nrows, block_bytes))
    remote, local = (np.zeros(case.shape.pool_nbytes, np.uint8) for _ in range(2))
    rows = rows_of(case, local.ctypes.data)
    given, taken = rows.copy(), rows.copy()
    pages = np.frombuffer(mmap.mmap(-1, _PAGES * mmap.PAGESIZE), np.uint8)[:: mmap.PAGESIZE]
    pages[:] = 1  # each of them is there
    with closing(open_transport(transport)) as serving, closing(open_transport(transport)) as reading:
        key = serving.register(remote.ctypes.data, remote.nbytes, Device()).key
        reading.register(local.ctypes.data, local.nbytes, Device())
        peer = reading.connect(serving.address(), [key])
        for rest_s in _RESTS_S:
            times_s: tuple[list[float], list[float], list[float]] = ([], [], [])
            for turn in range(2 * iters + 2):
                time.sleep(rest_s)
                copied_s = _took_s(lambda: np.copyto(taken, given)) if turn % 2 else 0.0
                pages[:1].sum()  # its own code is not what is timed
                touched_s = _took_s(pages.sum)
                began_s = time.perf_counter()
                read = reading.read(peer, rows)
                held_s = time.perf_counter() - began_s
                poll_until(reading, read, _DEADLINE_S)
                if turn >= 2:  # the first ones have fresh memory
                    times_s[turn % 2].append(copied_s if turn % 2 else held_s)
                    times_s[2].append(touched_s)
            read_s, copy_s, touch_s = map(statistics.median, times_s)
            yield {
                "transport": transport,
                "rows": nrows,
                "rest_s": rest_s,
                "held_ns_per_row": round(read_s / nrows * 1e9, 1),
                "copy_ns_per_row": round(copy_s / nrows * 1e9, 1),
                "touch_ns_per_page": round(touch_s / _PAGES * 1e9, 1),
            }


def _took_s(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m kvrdma.bench.held", description=__doc__)
    parser.add_argument("--transport", default="", help="the first installed one that reaches other processes")
    parser.add_argument("--rows", type=count, default=16384, help="rows of a read (default: 16384)")
    parser.add_argument("--block", type=count, default=4096, help="bytes of a row (default: 4096)")
    parser.add_argument("--iters", type=count, default=9, help="reads measured per rest (default: 9)")
    args = parser.parse_args(argv)
    for result in held(args.transport or best_transport(), args.rows, args.block, args.iters):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
