"""
Native core of the cma transport: batched process_vm_readv on its own threads.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def start_time(pid: int) -> int:
    """Start time of a process in ticks since boot, or 0."""

def leave_processor() -> bool:
    """
    Move the calling thread to another processor, for tests; False if it may use no other near by.
    """

class Core:
    """Regions, peers and reads of one process."""

    def __init__(self, threads: int) -> None: ...

    def identity(self) -> tuple[int, int, int, bytes]:
        """(pid, start time, cookie addr, cookie)"""

    def add_region(self, addr: int, nbytes: int) -> tuple[int, int, bytes]:
        """(region id, cookie addr, cookie)"""

    def remove_region(self, id: int) -> None: ...

    def check_open(self) -> None: ...

    def connect(self, pid: int, start_time: int, cookie_addr: int, cookie: bytes, memory: Sequence[tuple[int, int, int, bytes]]) -> int: ...

    def read(self, peer: int, grids: Sequence[tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)]]], then: Sequence[tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)]]]) -> int: ...

    def poll(self) -> list[tuple[str, int, int, int, int, int, str, int]]: ...

    def fileno(self) -> int: ...

    def disconnect(self, peer: int) -> None: ...

    def close(self) -> None: ...
