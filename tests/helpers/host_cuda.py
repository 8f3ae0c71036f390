"""Runs CudaReshaper without a GPU: reshape.cu built for the host behind the few CuPy names it uses.

``HostCupy`` counts allocations and lets a test hold events back, so that staging can be watched.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

SHIM = Path(__file__).with_name("cuda_host_shim.cpp")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build_host_kernel(source: Path, folder: Path, flags: tuple[str, ...] = ()) -> Path:
    """Compiles the kernel with g++; raises CalledProcessError with the compiler's words in stderr."""
    library = folder / "reshape_host.so"
    command = ["g++", "-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-pthread", "-fno-strict-aliasing"]
    define = f'-DKERNEL_SOURCE="{source}"'
    subprocess.run([*command, *flags, define, str(SHIM), "-o", str(library)], check=True)
    return library


class HostArray:
    """A "device" array: NumPy memory with CuPy's ``data.ptr`` and the CUDA array interface."""

    def __init__(self, values: NDArray[np.generic]) -> None:
        self.values = np.ascontiguousarray(values)
        self.data = SimpleNamespace(ptr=self.values.ctypes.data, copy_from_host_async=self._copy)

    def _copy(self, addr: int, nbytes: int, stream: HostContext) -> None:
        assert isinstance(stream, HostContext)
        ctypes.memmove(self.values.ctypes.data, addr, nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        values = self.values
        return {"typestr": values.dtype.str, "shape": values.shape, "data": (values.ctypes.data, False)}


class HostContext:
    """Stands for a device and for a stream: something to enter."""

    def __init__(self, ptr: int = 0, shared_limit: int = 0) -> None:
        self.ptr = ptr
        self.attributes = {"MaxSharedMemoryPerBlockOptin": shared_limit}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def synchronize(self) -> None:
        """Everything has run already."""


class HostEvent:
    def __init__(self, owner: HostCupy) -> None:
        self.owner = owner
        self.done = True

    def record(self, stream: HostContext) -> None:
        self.owner.streams.append(stream.ptr)
        self.done = not self.owner.hold_events

    def synchronize(self) -> None:
        self.owner.waits += 1
        self.done = True


def require_aligned(args: tuple[np.generic, ...]) -> None:
    """Fails where a GPU would fault and a host would not: an access wider than its address allows."""
    base, page_stride, _, num_pages, _, offset, unit_stride, count, *_, vector, _, _ = map(int, args)
    assert (base + offset) % vector == 0
    assert num_pages == 1 or page_stride % vector == 0
    assert count == 1 or unit_stride % vector == 0


class HostKernel:
    """Calls the host build of the kernel as CuPy's RawKernel would call the real one."""

    def __init__(self, owner: HostCupy) -> None:
        self.owner = owner
        self.max_dynamic_shared_size_bytes = 0
        self.preferred_shared_memory_carveout = 0

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[np.generic, ...], *, shared_mem: int) -> None:
        assert block == (256,)
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        require_aligned(args)
        kinds = {"u8": ctypes.c_uint64, "i8": ctypes.c_int64, "u4": ctypes.c_uint32}
        given = [kinds[f"{a.dtype.kind}{a.dtype.itemsize}"](a.item()) for a in args]
        launch = [ctypes.c_uint32(grid[0]), ctypes.c_uint32(self.owner.threads), ctypes.c_uint32(shared_mem)]
        self.owner.library.host_launch(*launch, *given)
        self.owner.launches.append({"grid": grid[0], "shared": shared_mem, "args": args})


@dataclass
class HostCupy:
    """The part of the ``cupy`` module that CudaReshaper uses."""

    library: ctypes.CDLL
    shared_limit: int = 99 << 10
    threads: int = 4
    allocations: int = 0
    waits: int = 0
    hold_events: bool = False
    launches: list[dict[str, object]] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        stream = SimpleNamespace(
            null=HostContext(), from_external=lambda given: HostContext(given.__cuda_stream__()[1])
        )
        self.cuda = SimpleNamespace(
            Device=lambda _device: HostContext(shared_limit=self.shared_limit),
            Stream=stream,
            Event=lambda disable_timing: HostEvent(self),  # noqa: ARG005
            alloc_pinned_memory=self._pinned,
        )

    def RawModule(self, code: str, options: tuple[str, ...]) -> SimpleNamespace:  # noqa: N802
        assert "kvrdma_reshape" in code
        assert options == ("--std=c++17",)
        return SimpleNamespace(get_function=lambda _name: HostKernel(self))

    def asarray(self, values: NDArray[np.generic]) -> HostArray:
        self.allocations += 1
        return HostArray(values)

    def empty(self, size: int, dtype: type[np.generic]) -> HostArray:
        return self.asarray(np.empty(size, dtype))

    def _pinned(self, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        self.allocations += 1
        return ctypes.create_string_buffer(nbytes)
