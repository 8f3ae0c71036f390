"""The builder of work requests, for tests."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def plan(rows: Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], *, max_sge: int, max_request: int, max_requests: int, max_chain: int, depth: int, speeds: Sequence[int]) -> list[tuple[int, list[tuple[int, int, list[tuple[int, int, int]]]]]]:
    """[(queue, [(remote region, offset, [(addr, local region, nbytes)])])]"""
