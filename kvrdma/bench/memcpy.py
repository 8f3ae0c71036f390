"""The yardstick: one thread copying the same rows within one process.

``np.take`` does one native ``memcpy`` per block. It gathers the fragmented side's blocks into a dense buffer,
which was 1-10 % faster than a C loop over the rows themselves: a ratio to it is never flattering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from kvrdma.bench.patterns import Bytes, Case, Ids, block_ids


def memcpy_of(case: Case, source: Bytes, target: Bytes) -> Callable[[], None]:
    """Prepare the copy of the case's rows from a pool of this process into a dense buffer.

    Args:
        case: what to copy.
        source: a pool of at least ``case.shape.pool_nbytes``.
        target: at least ``case.shape.nbytes``; overwritten.

    Returns:
        A function that does the copy once.
    """
    shape = case.shape
    if case.pattern == "contig":
        run_bytes = shape.blocks * shape.block_bytes
        runs = source[: shape.pool_nbytes].reshape(shape.layers, -1)[:, :run_bytes]
        into = target[: shape.nbytes].reshape(shape.layers, -1)
        return lambda: np.copyto(into, runs)
    blocks = source[: shape.pool_nbytes].reshape(-1, shape.block_bytes)
    dense = target[: shape.nbytes].reshape(-1, shape.block_bytes)
    ids = fragmented_rows(case)
    # The mode "raise" would buffer the output.
    return lambda: cast("None", np.take(blocks, ids, axis=0, out=dense, mode="clip"))


def fragmented_rows(case: Case) -> Ids:
    """Give the pool rows of the fragmented side (of the remote one, where both are), layer by layer."""
    local, remote = block_ids(case)
    ids = local if case.pattern == "remote_contig" else remote
    layers = np.arange(case.shape.layers)[:, None] * case.shape.pool_blocks
    return (layers + ids).ravel()
