"""The native part of kvrdma_ucx; kvrdma_ucx.transport is its only user."""

from collections.abc import Sequence
from typing import Annotated, Final

import numpy
from numpy.typing import NDArray


def ucx_version() -> str:
    """Version of the UCX that was loaded."""

def is_one_sided(transport: str) -> bool:
    """
    Whether a GET over this UCX transport needs nothing from the target's CPU.
    """

class Transport:
    def __init__(self, *, require_one_sided: bool, max_in_flight: int, peer_errors: bool = True) -> None: ...

    max_regions: Final[int] = ...
    """(arg: object, /) -> int"""

    def facts(self) -> tuple[str, list[str], bool, bool]:
        """(version, resources, cuda, refuses emulation)"""

    def register(self, addr: int, nbytes: int, cuda: int) -> tuple[int, int, bytes, bytes]:
        """(id, slot, cookie, rkey); cuda is the GPU's index or -1."""

    def deregister(self, region: int) -> None: ...

    def address(self) -> tuple[bytes, bytes, int, bytes]:
        """(worker address, instance, table addr, table rkey)"""

    def connect(self, worker: bytes, instance: bytes, table_addr: int, table_rkey: bytes, regions: Sequence[tuple[int, int, int, int, bytes, bytes]], timeout_s: float) -> tuple[int, bool, str]:
        """
        (peer, one_sided, via); regions are (addr, nbytes, slot, cuda, cookie, rkey).
        """

    def read(self, peer: int, grids: Sequence[tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)]]], then: Sequence[tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.uint64], dict(shape=(None, 4), order='C', device='cpu', writable=False)]]]) -> int: ...

    def poll(self) -> list[tuple[str, int, int, int, int, int, str, int]]: ...

    def fileno(self) -> int: ...

    def disconnect(self, peer: int) -> None: ...

    def close(self) -> None: ...
