"""Reshape, and its application to pages in host memory."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrdma.engine.shape import Shaper
from kvrdma.errors import ReshapeError
from kvrdma.layout import KVLayout
from kvrdma.page_format import LayerSpec
from kvrdma.plan import ReadPlan
from kvrdma.reshape import PagedMemory, Reshape, apply, apply_at, paged
from kvrdma.reshape.reference import apply_reference
from tests.helpers.reshape_cases import CASES, PagePool

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def test_reference_by_hand() -> None:
    # two small blocks of two heads with one token of two bytes: block, head -> head, block
    pages = np.array([[1, 2, 3, 4, 5, 6, 7, 8], [9] * 8], np.uint8)
    moved = apply_reference(Reshape((2, 2, 1, 2), (1, 0, 2, 3), 1), pages, [0])
    assert moved.tolist() == [[1, 2, 5, 6, 3, 4, 7, 8], [9] * 8]


def test_reference_units_by_hand() -> None:
    # from byte 1, two units of 2 x 2 single bytes, 5 bytes apart; bytes between and around them stay
    pages = np.arange(11, dtype=np.uint8).reshape(1, 11)
    moved = apply_reference(Reshape((2, 2), (1, 0), 1, offset=1, stride=5, count=2), pages, [0])
    assert moved.tolist() == [[0, 1, 3, 2, 4, 5, 6, 8, 7, 9, 10]]


@pytest.mark.parametrize(
    ("reshape", "message"),
    [
        (lambda: Reshape((), (), 1), "sizes of at least 1, got ()"),
        (lambda: Reshape((2, 0), (1, 0), 1), r"got \(2, 0\)"),
        (lambda: Reshape((2, 3), (0,), 1), r"permutation of 0\.\.1 for shape \(2, 3\), got \(0,\)"),
        (lambda: Reshape((2, 3), (1, 1), 1), r"got \(1, 1\)"),
        (lambda: Reshape((2,), (0,), 0), "got itemsize 0"),
        (lambda: Reshape((2,), (0,), 1, count=0), "count 0"),
        (lambda: Reshape((2,), (0,), 1, offset=-1), "offset -1"),
        (lambda: Reshape((2, 2), (1, 0), 2, stride=7, count=2), "stride 7 bytes is less than the 8 bytes"),
    ],
)
def test_a_contradictory_reshape_is_refused(reshape: object, message: str) -> None:
    assert callable(reshape)
    with pytest.raises(ReshapeError, match=message):
        reshape()


def test_sizes_are_counted_in_bytes() -> None:
    reshape = Reshape((2, 3), (1, 0), 4, offset=10, stride=100, count=3)
    assert reshape.nbytes == 24
    assert reshape.page_nbytes == 10 + 200 + 24
    assert reshape.result_shape == (3, 2)


@pytest.mark.parametrize(
    ("shape", "axes", "itemsize", "collapsed"),
    [
        ((4, 8, 16, 64), (1, 0, 2, 3), 2, ((4, 8), (1, 0), 2048)),  # the last axes become the element
        ((2, 4, 16, 64), (0, 2, 1, 3), 2, ((2, 4, 16), (0, 2, 1), 128)),
        ((2, 3, 4, 5), (2, 3, 0, 1), 1, ((6, 20), (1, 0), 1)),  # neighbours merge
        ((1, 8, 1, 4), (2, 1, 0, 3), 2, ((1,), (0,), 64)),  # axes of size 1 vanish: identity
        ((3, 1, 5), (2, 1, 0), 1, ((3, 5), (1, 0), 1)),
        ((2, 3, 4), (2, 1, 0), 1, ((2, 3, 4), (2, 1, 0), 1)),
    ],
)
def test_collapsed_by_hand(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    itemsize: int,
    collapsed: tuple[tuple[int, ...], tuple[int, ...], int],
) -> None:
    result = Reshape(shape, axes, itemsize, offset=7).collapsed()
    assert (result.shape, result.axes, result.itemsize, result.offset) == (*collapsed, 7)


@given(shape=SHAPES, itemsize=st.integers(1, 9), data=st.data())
def test_collapsing_moves_the_same_bytes(shape: list[int], itemsize: int, data: st.DataObject) -> None:
    reshape = Reshape(tuple(shape), tuple(data.draw(st.permutations(range(len(shape))))), itemsize)
    page = np.random.default_rng(0).integers(0, 256, (1, reshape.nbytes), dtype=np.uint8)
    moved = apply_reference(reshape, page, [0])
    collapsed = reshape.collapsed()
    assert np.array_equal(moved, apply_reference(collapsed, page, [0]))
    assert collapsed.collapsed() == collapsed
    order = np.arange(math.prod(shape)).reshape(shape).transpose(reshape.axes).ravel()
    assert reshape.is_identity == (order.tolist() == list(range(len(order))))


@pytest.mark.parametrize("shift", [0, 8, 1])
@pytest.mark.parametrize("name", CASES)
def test_host_pages_move_as_the_reference(name: str, shift: int) -> None:
    reshape = CASES[name]
    pool = PagePool(4, reshape.page_nbytes + 3 * shift, gap=shift, shift=shift)
    expected = pool.expected(reshape, [3, 0, 2])
    apply_at(reshape, pool.memory(None), [3, 0, 2])
    assert np.array_equal(pool.whole, expected)


@settings(deadline=None)
@given(
    shape=SHAPES,
    itemsize=st.integers(1, 40),
    placement=st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 3), st.integers(0, 17)),
    data=st.data(),
)
def test_random_host_pages_move_as_the_reference(
    shape: list[int], itemsize: int, placement: tuple[int, int, int, int], data: st.DataObject
) -> None:
    offset, gap, count, shift = placement
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    reshape = Reshape(tuple(shape), axes, itemsize, offset, math.prod(shape) * itemsize + gap, count)
    pool = PagePool(5, reshape.page_nbytes + shift, gap=gap, shift=shift)
    pages = data.draw(st.lists(st.integers(0, 4), unique=True))
    expected = pool.expected(reshape, pages)
    apply_at(reshape, pool.memory(None), pages)
    assert np.array_equal(pool.whole, expected)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "int8", "complex128"])
def test_torch_tensors_of_any_dtype_and_block_stride(dtype: str) -> None:
    import torch

    item = getattr(torch, dtype).itemsize
    raw = torch.randint(0, 256, (6, 2, 3 * 4 * 5 * item), dtype=torch.uint8)
    tensor = raw.view(getattr(torch, dtype)).view(6, 2, 3, 4, 5)[:, 1]  # every second page of the storage
    before = raw.numpy().copy()
    apply(Reshape((3, 4, 5), (1, 0, 2), item), tensor, torch.tensor([4, 1]))
    expected = before.copy()
    expected[:, 1] = apply_reference(Reshape((3, 4, 5), (1, 0, 2), item), before[:, 1], [4, 1])
    assert np.array_equal(raw.numpy(), expected)
    assert not np.array_equal(expected, before)


@pytest.mark.needs("torch")
def test_a_page_may_be_dense_in_any_memory_order() -> None:
    import torch

    cache = torch.zeros(3, 16, 2, 8, dtype=torch.float16).transpose(1, 2)  # [B, H, N, C] kept as [B, N, H, C]
    assert paged(cache) == PagedMemory(cache.data_ptr(), 512, 3, 512)


def test_a_tensor_of_one_page_has_no_page_stride() -> None:
    array = np.zeros((4, 10), np.uint8)[2:3]
    assert paged(array) == PagedMemory(array.ctypes.data, 10, 1, 10)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (np.zeros((2, 4, 6), np.uint8)[:, :, :3], r"axis of 4 with stride 6 where 3 is expected"),
        (np.zeros((4, 2, 6), np.uint8).transpose(1, 0, 2), r"axis of 4 with stride 12 where 6 is expected"),
        (
            np.lib.stride_tricks.as_strided(np.zeros(9, np.uint8), (3, 4), (2, 1)),
            "stride 2 is less than the 4",
        ),
        (np.zeros((2, 4), np.uint8)[:, ::-1], "axis of 4 with stride -1"),
        (np.array(1, np.uint8), "axis 0 must count the pages"),
        ([[1, 2]], "cannot reshape a list"),
        (np.broadcast_to(np.zeros((2, 4), np.uint8), (2, 4)), "read-only"),
        (np.zeros((2, 5), np.uint8), "needs 6 bytes of each page, pages have 5"),
    ],
)
def test_pages_that_cannot_be_reshaped_are_refused(tensor: object, message: str) -> None:
    with pytest.raises(ReshapeError, match=message):
        apply(Reshape((2, 3), (1, 0), 1), tensor, [0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([0, 4], r"page 4 is outside 0\.\.3"),
        ([-1], "page -1 is outside"),
        ([1, 2, 1], "page 1 is listed twice"),
        ([[0, 1]], "flat list"),
        ([0.0], "float64"),
        (np.array([True]), "bool"),
    ],
)
def test_wrong_page_numbers_are_refused_before_a_byte_moves(pages: list[int], message: str) -> None:
    tensor = np.arange(24, dtype=np.uint8).reshape(4, 6)
    with pytest.raises(ReshapeError, match=message):
        apply(Reshape((2, 3), (1, 0), 1), tensor, pages)
    assert tensor.ravel().tolist() == list(range(24))


def test_no_pages_and_identities_leave_everything() -> None:
    tensor = np.arange(24, dtype=np.uint8).reshape(4, 6)
    apply(Reshape((2, 3), (1, 0), 1), tensor, [])
    apply(Reshape((1, 6), (1, 0), 1), tensor, [0, 1, 2, 3])
    assert tensor.ravel().tolist() == list(range(24))


def test_scratch_is_one_page() -> None:
    reshape = CASES["block ratio"]
    tensor = np.zeros((64, reshape.nbytes), np.uint8)
    tracemalloc.start()
    apply(reshape, tensor, list(range(64)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reshape.nbytes <= peak < 2 * reshape.nbytes


def test_device_pages_without_cupy_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ReshapeError, match=r"cuda:99 needs CuPy: install kvrdma\[cuda12\]"):
        apply_at(Reshape((2, 2), (1, 0), 1), PagedMemory(0, 4, 1, 4, device=99), [0])


def test_device_page_numbers_for_host_pages_are_refused() -> None:
    class OnDevice:
        __cuda_array_interface__ = {"typestr": "<i8"}  # noqa: RUF012

    with pytest.raises(ReshapeError, match=r"use \.cpu\(\) first"):
        apply(Reshape((2, 2), (1, 0), 1), np.zeros((1, 4), np.uint8), OnDevice())  # type: ignore[arg-type]


def test_importing_loads_neither_torch_nor_cupy() -> None:
    code = "import sys, kvrdma.reshape; print(sorted({'torch', 'cupy', 'vllm'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize("dtype", [object, np.dtype([("a", "u8"), ("b", object)])])
def test_arrays_of_objects_are_refused(dtype: np.dtype[np.void] | type) -> None:
    """Their bytes are counted references: moving them by memory would crash the interpreter."""
    with pytest.raises(ReshapeError, match="its bytes are references that Python counts"):
        apply(Reshape((2, 8), (1, 0), 8), np.zeros((4, 16), dtype), [0])


@pytest.mark.needs("torch")
def test_sparse_tensors_and_ragged_pages_are_refused() -> None:
    import torch

    with pytest.raises(ReshapeError, match=r"tensor of layout torch.sparse_coo: give a dense one"):
        apply(Reshape((2, 8), (1, 0), 4), torch.zeros(4, 16).to_sparse(), [0])
    with pytest.raises(ReshapeError, match="pages must be a flat list of integers on the host"):
        apply(Reshape((2, 8), (1, 0), 1), np.zeros((4, 16), np.uint8), [[0], [1, 2]])  # type: ignore[list-item]


def test_an_engine_takes_caches_that_are_never_reshaped() -> None:
    """Heads outermost: pages lie among one another, no plan reshapes them, and the engine must not refuse them."""
    whole = np.zeros((2, 4, 5, 16, 12), np.uint16)
    caches = {str(i): whole[i].transpose(1, 0, 2, 3) for i in range(2)}
    layout = KVLayout.from_tensors(caches, LayerSpec((0, 4), 4, 16, dims="BHNC"))
    assert not layout.formats[0].is_dense(0)
    Shaper(layout, caches).finish(ReadPlan((), ()))
