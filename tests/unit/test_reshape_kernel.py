"""The CUDA kernel without a GPU: its source built for the host, driven by CudaReshaper."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrdma.errors import ReshapeError
from kvrdma.reshape import PagedMemory, Reshape
from kvrdma.reshape.cuda import SOURCE, CudaReshaper
from tests.helpers.host_cuda import SANITIZE, HostArray, HostCupy, build_host_kernel
from tests.helpers.reshape_cases import CASES, PagePool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(build_host_kernel(SOURCE, tmp_path_factory.mktemp("host_kernel"))))


def check(cupy: HostCupy, reshape: Reshape, pool: PagePool, indices: list[int]) -> None:
    expected = pool.expected(reshape, indices)
    CudaReshaper(cupy, 0).apply(reshape, pool.memory(0), indices, stream=0)  # type: ignore[arg-type]
    assert np.array_equal(pool.whole, expected)


@pytest.mark.parametrize("shift", [0, 16, 8, 4, 2, 1])
@pytest.mark.parametrize("name", CASES)
def test_kernel_moves_every_byte_as_the_reference(library: ctypes.CDLL, name: str, shift: int) -> None:
    reshape = CASES[name]
    pool = PagePool(4, reshape.page_nbytes + 5 * (shift == 1), gap=shift, shift=shift)
    check(HostCupy(library), reshape, pool, [3, 0, 2])


@pytest.mark.parametrize("threads", [1, 3, 32])
@pytest.mark.parametrize("shared_limit", [1 << 10, 48 << 10, 227 << 10])
@pytest.mark.parametrize("name", ["block ratio", "656-byte tokens", "cpu keys", "two bytes", "many axes"])
def test_any_block_size_and_shared_memory_gives_the_same(
    library: ctypes.CDLL, name: str, shared_limit: int, threads: int
) -> None:
    reshape = CASES[name]
    cupy = HostCupy(library, shared_limit=shared_limit, threads=threads)
    check(cupy, reshape, PagePool(3, reshape.page_nbytes), [1, 2])
    assert all(int(str(launch["shared"])) <= shared_limit for launch in cupy.launches)


@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    itemsize=st.integers(1, 40),
    placement=st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 3), st.integers(0, 17)),
    limit=st.sampled_from([128, 256, 1024, 48 << 10]),
    data=st.data(),
)
def test_random_reshapes_move_as_the_reference(
    library: ctypes.CDLL,
    shape: list[int],
    itemsize: int,
    placement: tuple[int, int, int, int],
    limit: int,
    data: st.DataObject,
) -> None:
    axes = data.draw(st.permutations(range(len(shape))))
    offset, gap, count, shift = placement
    unit = int(np.prod(shape)) * itemsize
    reshape = Reshape(tuple(shape), tuple(axes), itemsize, offset, unit + gap, count)
    pool = PagePool(3, reshape.page_nbytes + shift, gap=gap, shift=shift, seed=unit)
    check(HostCupy(library, shared_limit=limit, threads=2), reshape, pool, [2, 0])


def test_the_cases_reach_every_way_the_kernel_works(library: ctypes.CDLL) -> None:
    cupy = HostCupy(library)
    for reshape in CASES.values():
        pool = PagePool(1, reshape.page_nbytes)
        CudaReshaper(cupy, 0).apply(reshape, pool.memory(0), [0], 0)  # type: ignore[arg-type]
    numbers = [[int(a) for a in launch["args"][8:]] for launch in cupy.launches]  # type: ignore[index]
    tiles = [n for n in numbers if not n[7]]
    assert {(vector, piece) for *_, vector, piece, _ in tiles} >= {(16, p) for p in (16, 8, 4, 2, 1)} | {(1, 1)}
    assert {piece for *_, piece, cycles in numbers if cycles} == {16, 2, 1}
    assert any(slices > 1 for _, _, _, _, slices, *_ in tiles)
    assert any(groups > 1 for groups, *_ in tiles)


def test_a_second_call_allocates_nothing(library: ctypes.CDLL) -> None:
    cupy = HostCupy(library)
    reshaper = CudaReshaper(cupy, 0)  # type: ignore[arg-type]
    reshape, pool = CASES["block ratio"], PagePool(4, CASES["block ratio"].page_nbytes)
    reshaper.apply(reshape, pool.memory(0), [0], stream=7)
    first = cupy.allocations
    assert first == 3  # index table, pinned page numbers, their device copy
    reshaper.apply(reshape, pool.memory(0), [1, 2, 3], stream=7)
    assert cupy.allocations == first
    assert cupy.streams == [7, 7]


def test_prepare_leaves_only_the_staging_to_allocate(library: ctypes.CDLL) -> None:
    cupy = HostCupy(library)
    reshaper = CudaReshaper(cupy, 0)  # type: ignore[arg-type]
    reshape, pool = CASES["two bytes"], PagePool(4, CASES["two bytes"].page_nbytes)
    reshaper.prepare(reshape, pool.memory(0))
    assert cupy.allocations == 1
    expected = pool.expected(reshape, [2, 1])
    pages = HostArray(np.array([2, 1]))
    reshaper.apply(reshape, pool.memory(0), pages, stream=0)  # type: ignore[arg-type]
    assert cupy.allocations == 1
    assert np.array_equal(pool.whole, expected)


def test_staging_in_use_is_not_overwritten_and_is_bounded(library: ctypes.CDLL) -> None:
    cupy = HostCupy(library, hold_events=True)
    reshaper = CudaReshaper(cupy, 0)  # type: ignore[arg-type]
    reshape, pool = CASES["eight bytes"], PagePool(2, CASES["eight bytes"].page_nbytes)
    for _ in range(20):
        reshaper.apply(reshape, pool.memory(0), [1], stream=0)
    used = [int(launch["args"][2]) for launch in cupy.launches]  # type: ignore[index]
    assert len(set(used)) == 16
    assert used[16:] == used[:4]  # the oldest first, after waiting for it
    assert cupy.waits == 4


def test_staging_grows_with_the_number_of_pages(library: ctypes.CDLL) -> None:
    cupy = HostCupy(library)
    reshaper = CudaReshaper(cupy, 0)  # type: ignore[arg-type]
    reshape = Reshape((2, 2), (1, 0), 1)
    pool = PagePool(3000, 4)
    for indices in ([0], list(range(3000)), [1], list(range(2999, -1, -1))):
        expected = pool.expected(reshape, indices)
        reshaper.apply(reshape, pool.memory(0), indices, stream=0)
        assert np.array_equal(pool.whole, expected)
    assert cupy.allocations == 5  # a table and two stagings


@pytest.mark.parametrize(
    "pages", [np.array([0, 1], np.int32), np.array([[0, 1]]), np.array([0.0])], ids=["int32", "2-d", "float"]
)
def test_page_numbers_on_the_device_must_be_a_vector_of_int64(
    library: ctypes.CDLL, pages: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> None:
    reshaper = CudaReshaper(HostCupy(library), 0)  # type: ignore[arg-type]
    with pytest.raises(ReshapeError, match=r"dense int64 vector.*\.long\(\)\.contiguous\(\)"):
        reshaper.apply(
            CASES["two bytes"],
            PagePool(2, CASES["two bytes"].page_nbytes).memory(0),
            HostArray(pages),  # type: ignore[arg-type]
            stream=0,
        )


def test_a_launch_too_large_for_the_grid_is_refused(library: ctypes.CDLL) -> None:
    class Many:
        __cuda_array_interface__ = {"typestr": "<i8", "shape": (1 << 31,), "data": (0, False)}  # noqa: RUF012

    reshaper = CudaReshaper(HostCupy(library), 0)  # type: ignore[arg-type]
    with pytest.raises(ReshapeError, match="2147483648 CUDA blocks, a launch takes 2147483647"):
        reshaper.apply(Reshape((2, 2), (1, 0), 1), PagedMemory(0, 4, 1 << 31, 4, 0), Many(), stream=0)  # type: ignore[arg-type]


def test_a_unit_of_two_gigabytes_is_refused(library: ctypes.CDLL) -> None:
    reshaper = CudaReshaper(HostCupy(library), 0)  # type: ignore[arg-type]
    with pytest.raises(ReshapeError, match=r"has 2147483648 bytes .* at most 2147483647.*several units"):
        reshaper.apply(Reshape((2, 1 << 30), (1, 0), 1), PagedMemory(0, 1 << 31, 1, 1 << 31, 0), [0], stream=0)


TRAPPED = """
import ctypes, sys
import numpy as np
from kvrdma.reshape import Reshape
from kvrdma.reshape.cuda import CudaReshaper
from tests.helpers.host_cuda import HostArray, HostCupy
from tests.helpers.reshape_cases import PagePool
reshaper, memory = CudaReshaper(HostCupy(ctypes.CDLL(sys.argv[1])), 0), PagePool(2, 4).memory(0)
reshaper.apply(Reshape((2, 2), (1, 0), 1), memory, HostArray(np.array([1, int(sys.argv[2])])), stream=0)
"""


@pytest.mark.parametrize(("page", "status"), [(0, 0), (2, -signal.SIGABRT), (-1, -signal.SIGABRT)])
def test_page_numbers_on_the_device_out_of_range_stop_the_kernel(library: ctypes.CDLL, page: int, status: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TRAPPED, library._name, str(page)], cwd=ROOT, capture_output=True, check=False
    )
    assert ran.returncode == status
    assert ran.stderr.startswith(b"trap") == (status != 0)


SANITIZED = """
import ctypes, sys
from tests.helpers.host_cuda import HostCupy
from tests.helpers.reshape_cases import CASES, PagePool
from tests.unit.test_reshape_kernel import check
for name, reshape in CASES.items():
    for shift in (0, 2, 1):
        pool = PagePool(3, reshape.page_nbytes, gap=16, shift=shift)
        check(HostCupy(ctypes.CDLL(sys.argv[1]), threads=3), reshape, pool, [2, 0])
print("clean")
"""


def test_address_and_undefined_behaviour_sanitizers_find_nothing(tmp_path: Path) -> None:
    built = build_host_kernel(SOURCE, tmp_path, SANITIZE)
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(path.strip() for path in runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
    }
    ran = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(built)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "clean\n", ran.stderr[-3000:]
