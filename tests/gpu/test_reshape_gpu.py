"""The reshape kernel on a real GPU: exact, in stream order, without allocation, near a copy's speed.

Results carry their figures as properties; ``scripts/gpu-check`` prints them, one JSON line a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvrdma.reshape import (
    PagedMemory,
    Reshape,
    apply,
    apply_at,
    copy_kv_blocks,
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
)
from kvrdma.reshape.cuda import cuda_reshaper
from kvrdma.reshape.reference import apply_reference
from tests.helpers.reshape_cases import CASES, PagePool

pytestmark = [pytest.mark.needs("gpu"), pytest.mark.needs("torch")]

POOL_NBYTES = 64 << 20
LAUNCHES = 20
SLEEP_CYCLES = 100_000_000  # tens of milliseconds: longer than queueing the launches takes
LARGE = {
    "1 MiB pages, block ratio": Reshape((8, 8, 64, 256), (1, 0, 2, 3), 1),
    "1 MiB pages, source ranks": Reshape((8, 1024, 2, 64), (1, 0, 2, 3), 1),
    "0.5 MiB pages, cycles": Reshape((509, 512), (1, 0), 2),
}
# What plans make of real models: the bandwidth they must keep.
PLANNED = {
    "block 16 to 64, 8 heads": Reshape((4, 8, 16, 256), (1, 0, 2, 3), 2),
    "block 16 to 128, 2 heads": Reshape((8, 2, 16, 256), (1, 0, 2, 3), 2),
    "head-major to token-major": Reshape((1, 8, 64, 256), (0, 2, 1, 3), 2),
    "block 16 to 64, token-major": Reshape((4, 8, 16, 256), (0, 2, 1, 3), 2),
    "two token-major source ranks": Reshape((2, 64, 4, 256), (1, 0, 2, 3), 2),
    "dcp interleave, mla": Reshape((4, 16, 1, 576), (1, 0, 2, 3), 2),
    "dcp interleave, 656-byte tokens": Reshape((2, 32, 1), (1, 0, 2), 656),
    "cpu keys": Reshape((4, 128, 32), (1, 0, 2), 2, stride=2 * 128 * 128 * 2, count=2),
}
# Single elements change places: correct, and slower than a copy is expected to be.
ELEMENTS = {
    "two-byte transpose": Reshape((128, 128), (1, 0), 2),
    "four-byte transpose": Reshape((128, 64), (1, 0), 4),
}


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    import torch

    yield
    torch.cuda.synchronize()


class DevicePool:
    """A PagePool's bytes on the GPU, at an address that is as well or badly aligned."""

    def __init__(self, pool: PagePool) -> None:
        import torch

        self.pool = pool
        room = torch.empty(len(pool.whole) + 256, dtype=torch.uint8, device="cuda")
        start = (pool.whole.ctypes.data - room.data_ptr()) % 256
        self.whole = room[start : start + len(pool.whole)]
        self.whole.copy_(torch.from_numpy(pool.whole))

    @property
    def memory(self) -> PagedMemory:
        import torch

        host = self.pool.memory(torch.cuda.current_device())
        addr = host.addr - self.pool.whole.ctypes.data + self.whole.data_ptr()
        return PagedMemory(addr, host.page_stride, host.num_pages, host.page_nbytes, host.device)

    def numpy(self) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return self.whole.cpu().numpy()


@pytest.mark.parametrize("shift", [0, 16, 8, 4, 2, 1])
@pytest.mark.parametrize("name", CASES | LARGE)
def test_every_byte_as_the_reference(name: str, shift: int) -> None:
    import torch

    reshape = (CASES | LARGE)[name]
    pool = PagePool(4, reshape.page_nbytes + 5 * (shift == 1), gap=16 * shift, shift=shift)
    device = DevicePool(pool)
    expected = pool.expected(reshape, [3, 0, 2])
    stream = torch.cuda.current_stream().cuda_stream
    apply_at(reshape, device.memory, [3, 0], stream)
    apply_at(reshape, device.memory, torch.tensor([2], device="cuda"), stream)
    assert np.array_equal(device.numpy(), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("pages_on", ["cpu", "cuda"])
def test_torch_caches(dtype: str, pages_on: str) -> None:
    import torch

    item = getattr(torch, dtype).itemsize
    raw = torch.randint(0, 256, (40, 2, 4 * 8 * 16 * 64 * item), dtype=torch.uint8)
    reshape = Reshape((4, 8, 16, 64), (1, 0, 2, 3), item)
    cache = raw.cuda().view(getattr(torch, dtype)).view(40, 2, 8, 64, 64)[:, 1]
    pages = [7, 3, 39, 0]
    apply(reshape, cache, torch.tensor(pages, device=pages_on))
    expected = raw.numpy().copy()
    expected[:, 1] = apply_reference(reshape, expected[:, 1], pages)
    assert np.array_equal(cache.contiguous().view(torch.uint8).cpu().numpy().reshape(40, -1), expected[:, 1])


def test_cupy_arrays() -> None:
    import cupy

    pages = np.random.default_rng(0).integers(0, 256, (6, 4096), dtype=np.uint8)
    reshape = Reshape((4, 16, 64), (1, 0, 2), 1)
    array = cupy.asarray(pages)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.asarray(pages)
        apply(reshape, array, cupy.asarray([5, 1]))
        apply(reshape, array, [2])
        stream.synchronize()
    assert np.array_equal(cupy.asnumpy(array), apply_reference(reshape, pages, [5, 1, 2]))


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_receive_functions_as_on_the_cpu(ratio: int) -> None:
    import torch

    head_major = torch.randn(12, 8, 16, 128, dtype=torch.bfloat16)
    token_major = head_major.transpose(1, 2).contiguous().transpose(1, 2)
    indices = torch.tensor([11, 4, 0])
    for function, cache in (
        (kv_postprocess_blksize_on_receive, head_major),
        (kv_postprocess_blksize_and_layout_on_receive, token_major),
    ):
        device = cache.cuda()
        assert device.stride() == cache.stride()
        function(device, indices.cuda(), ratio)
        function(cache, indices, ratio)
        assert torch.equal(device.cpu(), cache)


def test_blocks_copied_to_the_device_and_back() -> None:
    import torch

    host = {"a": torch.randn(6, 4, 8), "b": torch.randn(6, 4, 8)}
    device = {name: torch.zeros(9, 4, 8, device="cuda") for name in host}
    back = {name: torch.zeros(6, 4, 8) for name in host}
    copy_kv_blocks(host, device, [0, 1, 5], [3, 4, 8], "h2d")
    copy_kv_blocks(device, back, [8, 3, 4], [2, 0, 1], "d2h")
    for name in host:
        assert torch.equal(back[name][:3], host[name][[0, 1, 5]])
        assert not back[name][3:].any()


@pytest.mark.parametrize("pages_on", ["cpu", "cuda"])
def test_calls_are_queued_in_stream_order_and_do_not_wait(pages_on: str) -> None:
    import torch

    reshape = CASES["block ratio"]
    pages = np.random.default_rng(0).integers(0, 256, (8, reshape.nbytes), dtype=np.uint8)
    source = torch.from_numpy(pages).cuda()
    cache = torch.zeros_like(source)
    numbers = torch.arange(8, device=pages_on)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        apply(reshape, cache, numbers)  # compiles, uploads the table
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5 * SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        cache.copy_(source)
        apply(reshape, cache, numbers)
        apply(reshape, cache, numbers[:2])  # a second upload must not overtake the first kernel
        running = not stream.query()
    stream.synchronize()
    expected = apply_reference(reshape, apply_reference(reshape, pages, range(8)), range(2))
    assert running, "the calls waited for the stream"
    assert np.array_equal(cache.cpu().numpy(), expected)


@pytest.mark.parametrize("pages_on", ["cpu", "cuda"])
def test_a_call_allocates_nothing(pages_on: str, record_property: Callable[[str, object], None]) -> None:
    import cupy
    import torch

    reshape = PLANNED["block 16 to 64, 8 heads"]
    cache = torch.zeros(256, reshape.nbytes, dtype=torch.uint8, device="cuda")
    numbers = torch.randperm(256, device=pages_on)

    def used() -> tuple[int, ...]:
        pool = cupy.get_default_memory_pool()
        free = torch.cuda.mem_get_info()[0]
        return pool.used_bytes(), pool.total_bytes(), torch.cuda.memory_allocated(), free

    for _ in range(3):
        apply(reshape, cache, numbers)
        torch.cuda.synchronize()
    before = used()
    peak = 0
    torch.cuda.reset_peak_memory_stats()
    for _ in range(50):
        apply(reshape, cache, numbers)
        peak = max(peak, torch.cuda.max_memory_allocated() - before[2])
        torch.cuda.synchronize()
    record_property("allocated_nbytes", peak)
    assert used() == before
    assert peak == 0


@pytest.mark.parametrize("name", PLANNED | ELEMENTS)
def test_bandwidth_on_64_mb_of_pages(name: str, record_property: Callable[[str, object], None]) -> None:
    import torch

    reshape = (PLANNED | ELEMENTS)[name]
    page_nbytes = reshape.stride * reshape.count if reshape.count > 1 else reshape.nbytes
    moved = reshape.nbytes * reshape.count
    pages = POOL_NBYTES // moved
    cache = torch.zeros(pages, page_nbytes, dtype=torch.uint8, device="cuda")
    numbers = torch.randperm(pages, device="cuda")
    source, target = (torch.empty(moved * pages, dtype=torch.uint8, device="cuda") for _ in range(2))
    apply(reshape, cache, numbers)
    works = {"reshape": lambda: apply(reshape, cache, numbers), "copy": lambda: target.copy_(source)}
    best = dict.fromkeys(works, math.inf)
    for _ in range(5):
        for key, work in works.items():
            best[key] = min(best[key], seconds_on_device(work))
    for key, took in best.items():
        record_property(f"{key}_gb_per_s", round(2 * moved * pages / took / 1e9, 1))
    ratio = best["copy"] / best["reshape"]
    record_property("ratio_to_copy", round(ratio, 3))
    record_property("page_nbytes", page_nbytes)
    record_property("pages", pages)
    record_property("gpu", torch.cuda.get_device_name())
    assert name in ELEMENTS or ratio >= 0.7


def seconds_on_device(work: Callable[[], object]) -> float:
    """Gives the time of one call on the device; the queue fills while the device sleeps."""
    import torch

    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(LAUNCHES):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / LAUNCHES


def test_all_launches_share_one_reshaper() -> None:
    import torch

    assert cuda_reshaper(torch.cuda.current_device()) is cuda_reshaper(torch.cuda.current_device())
