"""Reshapes pages in CUDA device memory on the caller's stream; CuPy compiles and launches ``reshape.cu``."""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvrdma.errors import ReshapeError
from kvrdma.reshape.pages import page_indices
from kvrdma.reshape.tiling import KERNEL, THREADS, VECTOR_NBYTES, Tiling, plan_tiling

if TYPE_CHECKING:
    from types import ModuleType

    import cupy
    from numpy.typing import NDArray

    from kvrdma.reshape.pages import PagedMemory, Pages
    from kvrdma.reshape.spec import Reshape

SOURCE = Path(__file__).with_name("reshape.cu")
MAX_TABLES = 256
MAX_SLOTS = 16  # uploads of page numbers in flight on one stream
MIN_SLOT_PAGES = 1024
MAX_GRID = (1 << 31) - 1


@functools.cache
def cuda_reshaper(device: int) -> CudaReshaper:
    """Gives the one reshaper of a CUDA device; the first call compiles the kernel for it.

    Raises:
        ReshapeError: CuPy is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise ReshapeError(
            f"reshaping pages on cuda:{device} needs CuPy: install kvrdma[cuda12] or kvrdma[cuda13]"
        ) from error
    return CudaReshaper(cupy, device)


class CudaReshaper:
    """Launches the kernel on one device and keeps what launches share: module, index tables, staging.

    Safe to call from several threads. Nothing is allocated or synchronised once a reshape has been used on a
    device (or prepared) and a stream has staged as many page numbers.
    """

    def __init__(self, cupy: ModuleType, device: int) -> None:
        self.device = device
        self._cupy = cupy
        self._lock = threading.Lock()
        self._launches: dict[tuple[Reshape, int], _Launch] = {}
        self._slots: dict[int, list[_Slot]] = {}
        with cupy.cuda.Device(device) as current:
            module = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=("--std=c++17",))
            self._kernel = module.get_function(KERNEL)
            self._shared_limit = int(current.attributes["MaxSharedMemoryPerBlockOptin"])
            self._kernel.max_dynamic_shared_size_bytes = self._shared_limit
            self._kernel.preferred_shared_memory_carveout = 100

    def prepare(self, reshape: Reshape, memory: PagedMemory) -> None:
        """Uploads the index table now, so that a later ``apply`` allocates nothing. Waits for the upload."""
        if not reshape.is_identity:
            with self._lock:
                self._launch(reshape, memory)

    def apply(self, reshape: Reshape, memory: PagedMemory, pages: Pages, stream: int) -> None:
        """Queues the reshape on a stream and returns.

        Args:
            reshape: what happens to each page.
            memory: pages on this device.
            pages: distinct page numbers. On the host they are checked and copied through pinned staging; an
                int64 array on the device is used where it lies, must stay alive until the kernel has run, and
                a number out of range stops the kernel with a trap.
            stream: ``cudaStream_t`` as an integer, 0 for the default stream.

        Raises:
            ReshapeError: the pages are malformed, or too many for one launch.
        """
        given = _device_pages(pages)
        indices = page_indices([] if given else pages, memory.num_pages)
        count = given[1] if given else len(indices)
        if count == 0 or reshape.is_identity:
            return
        queue = _external_stream(self._cupy, stream, self.device)
        with self._lock, self._cupy.cuda.Device(self.device), queue:
            launch = self._launch(reshape, memory)
            if given:
                launch.run(self._kernel, memory, given[0], count)
                return
            slot = self._slot(stream, count)
            slot.host[:count] = indices
            slot.numbers.data.copy_from_host_async(slot.host.ctypes.data, slot.host[:count].nbytes, queue)
            launch.run(self._kernel, memory, slot.numbers.data.ptr, count)
            slot.used.record(queue)

    def _launch(self, reshape: Reshape, memory: PagedMemory) -> _Launch:
        alignment = math.gcd(VECTOR_NBYTES, memory.addr, reshape.offset)
        if memory.num_pages > 1:
            alignment = math.gcd(alignment, memory.page_stride)
        if reshape.count > 1:
            alignment = math.gcd(alignment, reshape.stride)
        launch = self._launches.get((reshape, alignment))
        if launch is None:
            tiling, sources = plan_tiling(reshape, alignment, self._shared_limit)
            with self._cupy.cuda.Device(self.device), self._cupy.cuda.Stream.null as null:
                if len(self._launches) >= MAX_TABLES:
                    self._cupy.cuda.Device(self.device).synchronize()  # kernels may still read the tables
                    self._launches.clear()
                launch = _Launch(reshape, tiling, self._cupy.asarray(sources))
                null.synchronize()
            self._launches[reshape, alignment] = launch
        return launch

    def _slot(self, stream: int, count: int) -> _Slot:
        """Finds staging no kernel of the stream still reads; waits only if all ``MAX_SLOTS`` are in use."""
        slots = self._slots.setdefault(stream, [])
        free = next((slot for slot in slots if slot.used.done), None)
        if free is None and len(slots) >= MAX_SLOTS:
            free = slots[0]
            free.used.synchronize()
        if free is not None:
            slots.remove(free)
        if free is None or len(free.host) < count:
            free = _new_slot(self._cupy, max(MIN_SLOT_PAGES, 1 << (count - 1).bit_length()))
        slots.append(free)
        return free


@dataclass(frozen=True, slots=True)
class _Launch:
    """One reshape for one alignment, ready to launch."""

    reshape: Reshape
    tiling: Tiling
    table: cupy.ndarray

    def run(self, kernel: cupy.RawKernel, memory: PagedMemory, numbers: int, count: int) -> None:
        grid = count * self.reshape.count * self.tiling.groups * self.tiling.slices
        if grid > MAX_GRID:
            raise ReshapeError(
                f"{count} pages make {grid} CUDA blocks, a launch takes {MAX_GRID}: give the pages in parts"
            )
        kernel(
            (grid,),
            (THREADS,),
            kernel_arguments(self.reshape, self.tiling, memory, (numbers, self.table.data.ptr)),
            shared_mem=self.tiling.shared_nbytes,
        )


@dataclass(frozen=True, slots=True)
class _Slot:
    """Page numbers on their way to the device: pinned memory, its copy, and when both are free again."""

    host: NDArray[np.int64]
    numbers: cupy.ndarray
    used: cupy.cuda.Event


def kernel_arguments(
    reshape: Reshape, tiling: Tiling, memory: PagedMemory, pointers: tuple[int, int]
) -> tuple[np.generic, ...]:
    """Gives every argument of the kernel in its order; ``pointers``: the page numbers, the index table."""
    numbers, table = pointers
    return (
        np.uint64(memory.addr),
        np.int64(memory.page_stride),
        np.uint64(numbers),
        np.int64(memory.num_pages),
        np.uint64(table),
        np.int64(reshape.offset),
        np.int64(reshape.stride),
        np.uint32(reshape.count),
        *tiling.arguments(),
    )


def _new_slot(cupy: ModuleType, capacity: int) -> _Slot:
    pinned = cupy.cuda.alloc_pinned_memory(capacity * np.dtype(np.int64).itemsize)
    host = np.frombuffer(pinned, np.int64, capacity)
    return _Slot(host, cupy.empty(capacity, np.int64), cupy.cuda.Event(disable_timing=True))


def _device_pages(pages: Pages) -> tuple[int, int] | None:
    """Gives (address, count) of page numbers that already lie on a device, None for the host's."""
    interface = getattr(pages, "__cuda_array_interface__", None)
    if interface is None:
        return None
    if interface["typestr"] != "<i8" or len(interface["shape"]) != 1 or interface.get("strides"):
        raise ReshapeError(
            f"page numbers on a device must be a dense int64 vector, got shape {interface['shape']} of "
            f"{interface['typestr']}, strides {interface.get('strides')}: use .long().contiguous()"
        )
    return int(interface["data"][0]), int(interface["shape"][0])


class _StreamPointer:
    """Speaks the CUDA stream protocol for a ``cudaStream_t`` known as an integer."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._pointer)


def _external_stream(cupy: ModuleType, pointer: int, device: int) -> cupy.cuda.Stream:
    if pointer == 0:
        return cupy.cuda.Stream.null
    from_external = getattr(cupy.cuda.Stream, "from_external", None)
    if from_external is None:  # CuPy 13
        return cupy.cuda.ExternalStream(pointer, device)
    return from_external(_StreamPointer(pointer))
