"""Memory that a benchmark reads from and into: on the host, or on a GPU by CuPy or torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from kvrdma.bench import patterns
from kvrdma.bench.memcpy import fragmented_rows, memcpy_of
from kvrdma.bench.patterns import POISON, Bytes, Case, Words
from kvrdma.bench.room import check_pool, free_nbytes, no_room
from kvrdma.errors import ConfigError
from kvrdma.transport import Device

_PAGE = 4096


class Pool(Protocol):
    """One allocation, at ``addr`` for ``nbytes``, page-aligned like a KV cache."""

    device: Device
    addr: int
    nbytes: int

    def fill(self, generation: int) -> None:
        """Write this generation's tags; done when it returns."""
        ...

    def poison(self) -> None:
        """Write poison everywhere; done when it returns."""
        ...

    def host_bytes(self) -> Bytes:
        """Give the content; a view for host memory, a copy for a GPU's."""
        ...

    def ends(self, case: Case) -> Callable[[], Words]:
        """Prepare a quick look at ``patterns.end_words``, in that order; it overwrites what it returned before."""
        ...

    def memcpy(self, case: Case) -> Callable[[], None]:
        """Prepare the copy of the case's rows out of this pool; the function returns when it is done."""
        ...


class HostPool:
    """Host memory."""

    def __init__(self, nbytes: int) -> None:
        self.device = Device()
        check_pool(nbytes)
        try:
            buffer = np.empty(nbytes + _PAGE, np.uint8)
        except MemoryError:
            raise no_room(nbytes, free_nbytes()) from None
        start = -buffer.ctypes.data % _PAGE
        self._bytes: Bytes = buffer[start : start + nbytes]
        self.addr, self.nbytes = self._bytes.ctypes.data, nbytes

    def fill(self, generation: int) -> None:
        """Write tags."""
        patterns.fill(self._bytes, generation)

    def poison(self) -> None:
        """Write poison."""
        self._bytes[:] = POISON

    def host_bytes(self) -> Bytes:
        """Give a view."""
        return self._bytes

    def ends(self, case: Case) -> Callable[[], Words]:
        """Prepare a gather into a buffer of its own, touched once."""
        words = self._bytes[: case.shape.pool_nbytes].view(np.uint64)
        local, _ = patterns.end_words(case)
        seen = np.full(len(local), 1, np.uint64)
        # The mode "raise" would buffer the output.
        return lambda: np.take(words, local, out=seen, mode="clip")

    def memcpy(self, case: Case) -> Callable[[], None]:
        """Prepare the copy into a buffer of its own, touched once."""
        return memcpy_of(case, self._bytes, np.full(case.shape.nbytes, 1, np.uint8))


class CupyPool:
    """GPU memory by CuPy."""

    def __init__(self, nbytes: int, device: Device) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self.device = device
        self._context = self._cupy.cuda.Device(device.index)
        with self._context:
            self._array = self._cupy.empty(nbytes, dtype=np.uint8)
        self.addr, self.nbytes = int(self._array.data.ptr), nbytes

    def fill(self, generation: int) -> None:
        """Make the tags on the host and copy them."""
        host = np.empty(self.nbytes, np.uint8)
        patterns.fill(host, generation)
        with self._context:
            self._array.set(host)
            self._cupy.cuda.runtime.deviceSynchronize()

    def poison(self) -> None:
        """Write poison."""
        with self._context:
            self._array.fill(POISON)
            self._cupy.cuda.runtime.deviceSynchronize()

    def host_bytes(self) -> Bytes:
        """Copy to the host."""
        with self._context:
            copied: Bytes = self._array.get()
            return copied

    def ends(self, case: Case) -> Callable[[], Words]:
        """Prepare one gather kernel and a copy to the host."""
        with self._context:
            local = self._cupy.asarray(patterns.end_words(case)[0])
            words = self._array[: case.shape.pool_nbytes].view(np.uint64)
            seen = self._cupy.empty(len(local), dtype=np.uint64)

        def look() -> Words:
            with self._context:
                self._cupy.take(words, local, out=seen)
                copied: Words = seen.get()
                return copied

        look()  # compiles the kernel
        return look

    def memcpy(self, case: Case) -> Callable[[], None]:
        """Prepare one gather kernel."""
        shape = case.shape
        with self._context:
            ids = self._cupy.asarray(fragmented_rows(case))
            blocks = self._array[: shape.pool_nbytes].view(np.uint64).reshape(-1, shape.block_bytes // 8)
            dense = self._cupy.empty((shape.rows, shape.block_bytes // 8), dtype=np.uint64)

        def gather() -> None:
            with self._context:
                self._cupy.take(blocks, ids, axis=0, out=dense)
                self._cupy.cuda.runtime.deviceSynchronize()

        return gather


class TorchPool:
    """GPU memory by torch."""

    def __init__(self, nbytes: int, device: Device) -> None:
        self._torch: Any = importlib.import_module("torch")
        self.device = device
        self._tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, device=str(device))
        self.addr, self.nbytes = int(self._tensor.data_ptr()), nbytes

    def _synchronize(self) -> None:
        self._torch.cuda.synchronize(self.device.index)

    def fill(self, generation: int) -> None:
        """Make the tags on the host and copy them."""
        host = np.empty(self.nbytes, np.uint8)
        patterns.fill(host, generation)
        self._tensor.copy_(self._torch.from_numpy(host))
        self._synchronize()

    def poison(self) -> None:
        """Write poison."""
        self._tensor.fill_(POISON)
        self._synchronize()

    def host_bytes(self) -> Bytes:
        """Copy to the host."""
        copied: Bytes = self._tensor.cpu().numpy()
        return copied

    def ends(self, case: Case) -> Callable[[], Words]:
        """Prepare one gather kernel and a copy to the host."""
        torch = self._torch
        words = self._tensor[: case.shape.pool_nbytes].view(torch.int64)
        local = torch.from_numpy(patterns.end_words(case)[0]).to(words.device)
        seen = torch.empty(len(local), dtype=torch.int64, device=words.device)

        def look() -> Words:
            torch.index_select(words, 0, local, out=seen)
            copied: Words = seen.cpu().numpy().view(np.uint64)
            return copied

        look()  # loads the kernel
        return look

    def memcpy(self, case: Case) -> Callable[[], None]:
        """Prepare one gather kernel."""
        torch, shape = self._torch, case.shape
        words = self._tensor[: shape.pool_nbytes].view(torch.int64)
        blocks = words.reshape(-1, shape.block_bytes // 8)
        ids = torch.from_numpy(fragmented_rows(case)).to(self._tensor.device)
        dense = torch.empty((shape.rows, shape.block_bytes // 8), dtype=torch.int64, device=blocks.device)

        def gather() -> None:
            torch.index_select(blocks, 0, ids, out=dense)
            self._synchronize()

        return gather


def allocate(nbytes: int, device: Device) -> Pool:
    """Allocate a pool.

    Raises:
        ConfigError: it does not fit into memory; or GPU memory is asked for and neither CuPy nor torch with CUDA
            is installed, or there is no such GPU.
    """
    if device.kind == "cpu":
        return HostPool(nbytes)
    kind = _gpu_pool()
    try:
        return kind(nbytes, device)
    except RuntimeError as error:
        raise ConfigError(f"device {device}: cannot allocate {nbytes} bytes there: {error}") from error


def check_device(device: Device) -> None:
    """Refuse a device whose memory cannot be allocated with what is installed.

    Raises:
        ConfigError: names the extra to install.
    """
    if device.kind != "cpu":
        _gpu_pool()


def _gpu_pool() -> type[CupyPool | TorchPool]:
    if importlib.util.find_spec("cupy"):
        return CupyPool
    if importlib.util.find_spec("torch") and importlib.import_module("torch").cuda.is_available():
        return TorchPool
    raise ConfigError("GPU memory needs CuPy or a torch with CUDA: pip install 'kvrdma[cuda12]' or 'kvrdma[cuda13]'")
