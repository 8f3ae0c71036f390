"""The functions under vLLM's names, against references by hand and against vLLM's own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from kvrdma.errors import ReshapeError
from kvrdma.reshape import (
    apply,
    copy_kv_blocks,
    cpu_key_reshape,
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_cpu_attention_on_receive,
)

if TYPE_CHECKING:
    import torch

VLLM_UTILS = "vllm.distributed.kv_transfer.kv_connector.utils"
pytestmark = pytest.mark.needs("torch")


def tokens(blocks: int, heads: int, count: int, content: int) -> NDArray[np.float32]:
    """Gives distinct values ``[blocks, heads, count, content]``."""
    shape = (blocks, heads, count, content)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def small_blocks(page: NDArray[np.float32], ratio: int) -> NDArray[np.float32]:
    """Gives the bytes of ``[H, N, C]`` as head-major small blocks, one after another."""
    n = page.shape[1] // ratio
    return np.concatenate([page[:, i * n : (i + 1) * n].ravel() for i in range(ratio)])


@pytest.mark.parametrize("ratio", [1, 2, 4, 16])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_block_size(library: str, ratio: int) -> None:
    import torch

    want = tokens(6, 3, 16, 8)
    cache = want.copy()
    for block in (5, 1):
        cache[block] = small_blocks(want[block], ratio).reshape(cache[block].shape)
    assert (ratio == 1) == np.array_equal(cache, want)
    if library == "torch":
        kv_postprocess_blksize_on_receive(torch.from_numpy(cache), torch.tensor([5, 1]), ratio)
    else:
        kv_postprocess_blksize_on_receive(cache, [5, 1], ratio)
    assert np.array_equal(cache, want)


@pytest.mark.parametrize("ratio", [1, 2, 4, 16])
def test_block_size_and_layout(ratio: int) -> None:
    import torch

    want = tokens(6, 3, 16, 8)
    memory = np.ascontiguousarray(want.transpose(0, 2, 1, 3))  # token-major
    for block in (2, 4):
        memory[block] = small_blocks(want[block], ratio).reshape(memory[block].shape)
    cache = torch.from_numpy(memory).transpose(1, 2)
    assert (ratio == 16) == np.array_equal(cache.numpy(), want)  # blocks of one token have no head-major order
    kv_postprocess_blksize_and_layout_on_receive(cache, torch.tensor([4, 2]), ratio)
    assert np.array_equal(cache.numpy(), want)


def test_blocks_inside_a_bigger_row_leave_the_rest_of_the_row() -> None:
    import torch

    want = tokens(4, 2, 8, 4)
    rows = np.full((4, 3, 2, 8, 4), -1, np.float32)  # block-outermost: three layers to a row
    for block in range(4):
        rows[block, 1] = small_blocks(want[block], 2).reshape(2, 8, 4)
    kv_postprocess_blksize_on_receive(torch.from_numpy(rows)[:, 1], [0, 1, 2, 3], 2)
    assert np.array_equal(rows[:, 1], want)
    assert (rows[:, [0, 2]] == -1).all()


@pytest.mark.parametrize(
    ("shape", "ratio", "message"),
    [
        ((2, 2, 6, 4), 4, "ratio 4 does not divide the 6 tokens"),
        ((2, 2, 6, 4), 0, "ratio 0"),
        ((2, 6, 4), 2, r"must be \[num_blocks, H, N, C\], got shape \(2, 6, 4\)"),
    ],
)
def test_wrong_shapes_are_refused(shape: tuple[int, ...], ratio: int, message: str) -> None:
    for function in (
        kv_postprocess_blksize_on_receive,
        kv_postprocess_blksize_and_layout_on_receive,
        kv_postprocess_cpu_attention_on_receive,
    ):
        with pytest.raises(ReshapeError, match=message):
            function(np.zeros(shape, np.float32), [0], ratio)


def test_a_cache_of_the_other_layout_is_refused() -> None:
    head_major = np.zeros((2, 3, 4, 5), np.float32)
    token_major = np.zeros((2, 4, 3, 5), np.float32).transpose(0, 2, 1, 3)
    with pytest.raises(ReshapeError, match=r"must be head-major .* strides \(240, 20, 60, 4\)"):
        kv_postprocess_blksize_on_receive(token_major, [0], 2)
    with pytest.raises(ReshapeError, match="must be token-major"):
        kv_postprocess_blksize_and_layout_on_receive(head_major, [0], 2)


def test_cpu_attention_needs_keys_and_values_of_one_size() -> None:
    with pytest.raises(ReshapeError, match="got content size 5"):
        kv_postprocess_cpu_attention_on_receive(np.zeros((2, 3, 4, 5), np.float32), [0], 2)


@pytest.mark.needs("vllm")
@pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn
@pytest.mark.parametrize("ratio", [1, 2, 8])
@pytest.mark.parametrize("token_major", [False, True])
def test_same_bytes_as_vllm(ratio: int, token_major: bool) -> None:
    import torch

    utils = importlib.import_module(VLLM_UTILS)
    cache = torch.randn(9, 4, 16, 24, dtype=torch.bfloat16)
    if token_major:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    name = "kv_postprocess_blksize_and_layout_on_receive" if token_major else "kv_postprocess_blksize_on_receive"
    ours = cache.clone(memory_format=torch.preserve_format)
    assert ours.stride() == cache.stride()
    indices = torch.tensor([8, 0, 3])
    getattr(utils, name)(cache, indices, ratio)
    {True: kv_postprocess_blksize_and_layout_on_receive, False: kv_postprocess_blksize_on_receive}[token_major](
        ours, indices, ratio
    )
    assert torch.equal(ours.view(torch.int16), cache.view(torch.int16))


def pack_cpu(keys: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Packs keys and values ``[N, H, D]`` as CPU attention does: per head K ``[D, N]``, then V ``[N, D]``."""
    heads = keys.shape[1]
    return np.concatenate([part for h in range(heads) for part in (keys[:, h].T.ravel(), values[:, h].ravel())])


def cpu_caches(ratio: int, n: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Gives (received, expected) caches of four pages; pages 3 and 1 arrived as ``ratio`` small ones."""
    heads, size = 3, 8
    count = ratio * n
    drawn = np.random.default_rng(0).standard_normal((2, 4, count, heads, size), dtype=np.float32)
    want = np.stack([pack_cpu(k, v) for k, v in zip(*drawn, strict=True)])
    landed = want.copy()
    for page in (3, 1):
        parts = [slice(i * n, (i + 1) * n) for i in range(ratio)]
        landed[page] = np.concatenate([pack_cpu(drawn[0, page, p], drawn[1, page, p]) for p in parts])
    shape = (4, heads, count, 2 * size)
    return landed.reshape(shape), want.reshape(shape)


@pytest.mark.parametrize(("ratio", "n"), [(1, 32), (2, 32), (4, 32), (3, 5)])
def test_cpu_attention_blocks(ratio: int, n: int) -> None:
    import torch

    landed, want = cpu_caches(ratio, n)
    assert (ratio == 1) == np.array_equal(landed, want)
    kv_postprocess_cpu_attention_on_receive(torch.from_numpy(landed), torch.tensor([3, 1]), ratio)
    assert np.array_equal(landed, want)


@pytest.mark.needs("vllm")
@pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn
def test_cpu_attention_blocks_32_to_64_where_vllm_gives_wrong_bytes() -> None:
    import torch

    utils = importlib.import_module(VLLM_UTILS)
    landed, want = cpu_caches(2, 32)
    theirs, ours = torch.from_numpy(landed.copy()), torch.from_numpy(landed.copy())
    utils.kv_postprocess_blksize_on_receive(theirs, torch.tensor([3, 1]), 2)
    kv_postprocess_cpu_attention_on_receive(ours, torch.tensor([3, 1]), 2)
    right = [(cache.numpy() == want)[[3, 1]].mean() for cache in (theirs, ours)]
    assert right[1] == 1.0
    assert right[0] < 0.5


def packed_by_vllm(drawn: torch.Tensor, size: int) -> torch.Tensor:
    """Lets vLLM's kernel pack ``[2, N, H, D]`` into pages of ``size`` tokens ``[pages, H, size, 2 * D]``."""
    import torch
    from vllm import _custom_ops

    _, count, heads, head_size = drawn.shape
    cache = torch.zeros(count // size, heads, size, 2 * head_size, dtype=drawn.dtype)
    keys, values = cache.view(-1, heads, 2 * size, head_size).chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(drawn[0], drawn[1], keys, values, torch.arange(count), "vec")
    return cache


@pytest.mark.needs("vllm")
@pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn
def test_cpu_attention_pages_are_those_vllm_writes() -> None:
    import torch

    drawn = torch.randn(2, 128, 3, 64, dtype=torch.bfloat16)
    received = packed_by_vllm(drawn, 32).view(2, 3, 64, 128)  # two small pages land in each big one
    want = packed_by_vllm(drawn, 64)
    assert not torch.equal(received, want)
    kv_postprocess_cpu_attention_on_receive(received, torch.tensor([0, 1]), 2)
    assert torch.equal(received, want)


def test_cpu_keys_alone_where_values_landed_in_place() -> None:
    keys, values = np.arange(24, dtype=np.float32).reshape(6, 2, 2), np.full((6, 2, 2), -1, np.float32)
    want = pack_cpu(keys, values)
    heads = want.copy().reshape(2, 2, 12)
    for head in range(2):  # the keys of three small pages of two tokens, one after another
        heads[head, 0] = np.concatenate([keys[i : i + 2, head].T.ravel() for i in (0, 2, 4)])
    page = heads.reshape(1, -1)
    assert page[0, :4].tolist() == [0, 4, 1, 5]
    assert want[:6].tolist() == [0, 4, 8, 12, 16, 20]
    apply(cpu_key_reshape(heads=2, tokens=6, head_size=2, block_size_ratio=3, itemsize=4), page, [0])
    assert np.array_equal(page[0], want)


PAIRS = {
    "neighbours": [(i + 10, i + 20) for i in range(100)],
    "scattered, more than one stage": [((7 * i) % 150, (11 * i) % 160) for i in range(140)],
    "neighbours on one side only": [(i, 2 * i) for i in range(70)],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_copy_kv_blocks(pairs: list[tuple[int, int]], dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)
    raw = {name: torch.randint(0, 100, (150, 2, 4 * kind.itemsize), dtype=torch.uint8) for name in "ab"}
    source = {name: bytes_.view(kind) for name, bytes_ in raw.items()}
    rows = {name: torch.zeros(160, 3, 2, 4 * kind.itemsize, dtype=torch.uint8) for name in "ab"}
    target = {name: bytes_.view(kind)[:, 1] for name, bytes_ in rows.items()}  # blocks of a bigger row
    direction: Literal["h2d", "d2h"] = "d2h" if dtype == "int8" else "h2d"
    copy_kv_blocks(source, target, [s for s, _ in pairs], [d for _, d in pairs], direction)
    for name in "ab":
        want = torch.zeros_like(rows[name])
        for src, dst in pairs:
            want[dst, 1] = raw[name][src]
        assert torch.equal(rows[name], want)


def test_copy_kv_blocks_does_nothing_without_pairs() -> None:
    import torch

    source, target = {"a": torch.ones(2, 3)}, {"a": torch.zeros(2, 3)}
    copy_kv_blocks({}, target, [0], [0], "h2d")
    copy_kv_blocks(source, {}, [0], [0], "h2d")
    copy_kv_blocks(source, target, [], [0], "h2d")
    copy_kv_blocks(source, target, [0], [], "h2d")
    copy_kv_blocks(source, target, [0, 1], [0], "h2d")
    assert not target["a"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"direction": "d2d"}, "'h2d' or 'd2h', got 'd2d'"),
        ({"src_ids": [0, 2]}, r"layer a: source block ids 0\.\.2 leave 0\.\.1"),
        ({"dst_ids": [-1, 0]}, r"layer a: destination block ids -1\.\.0 leave 0\.\.1"),
        ({"dst_caches": {"b": np.zeros((2, 3))}}, "layer a has no destination"),
        ({"dst_caches": {"a": np.zeros((2, 4))}}, r"source blocks are \(3,\) .* destination blocks \(4,\)"),
    ],
)
def test_copy_kv_blocks_refuses_before_copying(change: dict[str, object], message: str) -> None:
    import torch

    target = {"a": torch.zeros(2, 3, dtype=torch.float64)}
    arguments: dict[str, object] = {
        "src_caches": {"a": torch.ones(2, 3, dtype=torch.float64)},
        "dst_caches": target,
        "src_ids": [0, 1],
        "dst_ids": [0, 1],
        "direction": "h2d",
    }
    with pytest.raises(ReshapeError, match=message):
        copy_kv_blocks(**(arguments | change))  # type: ignore[arg-type]
    assert not target["a"].any()
