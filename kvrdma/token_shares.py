"""Bounds of the sizes of an engine, and which ranks of two engines hold positions in common."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from kvrdma.errors import TopologyError

MAX_RANKS = 4096
"""Ranks of an engine: far above any, and every pair of ranks of two engines can still be looked at."""
MAX_HEADS = 1 << 16
MAX_INTERLEAVE = 1 << 20


def require_size(name: str, size: int, most: int) -> None:
    """Refuse a size that no engine has, before anything is made as large as it says.

    Raises:
        TopologyError: names the size and the bounds.
    """
    if not hasattr(size, "__index__"):
        raise TopologyError(f"{name} must be at least 1 and at most {most} and a whole number, got {size!r:.80}")
    if not 1 <= size <= most:
        raise TopologyError(f"{name} must be at least 1 and at most {most}, got {size}")


@lru_cache(maxsize=4096)
def dcp_overlap(local: tuple[int, int, int], remote_dcp: int, remote_interleave: int) -> tuple[int, ...]:
    """Remote dcp ranks that hold a position of the local (dcp_rank, dcp_size, interleave).

    A rank holds ``[rank * interleave, (rank + 1) * interleave)`` of every round of ``size * interleave`` positions.
    By the Chinese remainder theorem, places u and v of two such intervals are ever the same position where u - v is
    a multiple of the greatest common divisor of the two rounds.
    """
    rank, dcp_size, interleave = local
    divisor = math.gcd(dcp_size * interleave, remote_dcp * remote_interleave)
    ranks = np.arange(remote_dcp, dtype=np.int64)
    highest = (rank + 1) * interleave - 1 - ranks * remote_interleave
    lowest = rank * interleave - ((ranks + 1) * remote_interleave - 1)
    return tuple(np.flatnonzero(highest // divisor * divisor >= lowest).tolist())
