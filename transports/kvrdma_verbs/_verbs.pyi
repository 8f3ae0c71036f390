"""
The native part of kvrdma_verbs; kvrdma_verbs.transport is its only user.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import numpy
from numpy.typing import NDArray


class Transport:
    def __init__(self, ports: Sequence[tuple[str, int, int]], *, queues_per_lane: int, busy_poll_us: int) -> None:
        """ports are (device, port, GID index)."""

    max_regions: Final[int] = ...
    """(arg: object, /) -> int"""

    def register(self, addr: int, nbytes: int, cuda: int) -> tuple[int, int, bytes, list[int]]:
        """(id, slot, cookie, rkeys by device); cuda is the GPU's index or -1."""

    def deregister(self, region: int) -> None: ...

    def address(self) -> tuple[bytes, int, int, list[int], list[str]]:
        """(instance, TCP port, table addr, table rkeys, device names)"""

    def connect(self, hosts: Sequence[str], port: int, instance: bytes, table_addr: int, table_rkeys: Sequence[int], regions: Sequence[tuple[int, int, int, bytes, Sequence[int]]], lanes: Sequence[tuple[int, int]], timeout_s: float) -> tuple[int, str]:
        """
        (peer, via); regions are (addr, nbytes, slot, cookie, rkeys), lanes (our device, theirs).
        """

    def read(self, peer: int, grids: Sequence[tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)]]], then: Sequence[tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)]]]) -> int: ...

    def poll(self) -> list[tuple[str, int, int, int, int, int, str, int]]: ...

    def fileno(self) -> int: ...

    def disconnect(self, peer: int) -> None: ...

    def close(self) -> None: ...
