"""Whether the memory that a link test needs is there, asked before any of it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvrdma.bench.patterns import Case
from kvrdma.errors import ConfigError

MEMINFO = Path("/proc/meminfo")
_ROW_NBYTES = 128
"""Of a row and its share of the block ids, while they are drawn."""


def gib(nbytes: int) -> str:
    """Write a size for people: ``12.5 GiB``."""
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"


def free_nbytes() -> int | None:
    """Bytes this host can still hand out without swapping; None where the system does not say."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) << 10 if found else None


def check_room(cases: Sequence[Case], *, peer_here: bool) -> None:
    """Refuse cases that do not fit into this host's memory.

    Args:
        cases: the reads of the test.
        peer_here: whether the peer's pool is in this host's memory as well.

    Raises:
        ConfigError: says what is needed on each side and what is free.
    """
    free = free_nbytes()
    pool = max(case.shape.pool_nbytes for case in cases)
    work = max(case.shape.nbytes + case.shape.rows * _ROW_NBYTES for case in cases)
    need = pool + work + (pool if peer_here else 0)
    if free is not None and need > free:
        where = f", together {gib(need)} on this host" if peer_here else ""
        raise ConfigError(
            f"not enough memory: a pool of {gib(pool)} on each side and {gib(work)} to copy and check on the reading "
            f"side{where}; {gib(free)} are free: give a smaller --nbytes (or fewer --tokens)"
        )


def check_pool(nbytes: int) -> None:
    """Refuse a pool that does not fit into this host's memory.

    Raises:
        ConfigError: says what is needed and what is free.
    """
    free = free_nbytes()
    if free is not None and nbytes > free:
        raise no_room(nbytes, free)


def no_room(nbytes: int, free: int | None) -> ConfigError:
    """Make the error of a pool that cannot be had."""
    known = f"{gib(free)} are free" if free is not None else "the system refuses it"
    return ConfigError(f"a pool of {gib(nbytes)} does not fit into memory: {known}; give a smaller --nbytes")
