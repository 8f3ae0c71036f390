"""Finishes blocks after a receive, under the names vLLM's connectors use for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvrdma.errors import ReshapeError
from kvrdma.reshape.dispatch import apply
from kvrdma.reshape.pages import memory_strides
from kvrdma.reshape.spec import Reshape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvrdma.reshape.pages import Pages, Tensor

STAGED_BLOCKS = 64
SCATTERED_RUN = 4  # blocks a run must have on average to be worth a copy of its own


def kv_postprocess_blksize_on_receive(cache: Tensor, indices: Pages, block_size_ratio: int) -> None:
    """Turns ``r`` small head-major blocks that landed one after another into one big block, in place.

    The bytes of each listed block go from ``(r, H, n, C)`` to ``(H, r, n, C)`` with ``n = N // r``.

    Args:
        cache: ``[num_blocks, H, N, C]``, head-major in memory inside a block; blocks may be strided.
        indices: the distinct blocks just received.
        block_size_ratio: ``r``, tokens of a local block over tokens of a remote block.

    Raises:
        ReshapeError: ``r`` does not divide ``N``, or a block is not dense and head-major.
    """
    _, heads, tokens, content = _block_shape(cache, block_size_ratio)
    _require_order(cache, (1, 2, 3), "head-major [H, N, C]")
    shape = (block_size_ratio, heads, tokens // block_size_ratio, content)
    apply(Reshape(shape, (1, 0, 2, 3), _itemsize(cache)), cache, indices)


def kv_postprocess_blksize_and_layout_on_receive(cache: Tensor, indices: Pages, block_size_ratio: int) -> None:
    """Turns ``r >= 1`` small head-major blocks into one token-major block, in place.

    The bytes of each listed block go from ``(r, H, n, C)`` to ``(r, n, H, C)`` with ``n = N // r``.

    Args:
        cache: ``[num_blocks, H, N, C]``, token-major in memory inside a block (``[N, H, C]``).
        indices: the distinct blocks just received.
        block_size_ratio: ``r``, tokens of a local block over tokens of a remote block.

    Raises:
        ReshapeError: ``r`` does not divide ``N``, or a block is not dense and token-major.
    """
    _, heads, tokens, content = _block_shape(cache, block_size_ratio)
    _require_order(cache, (2, 1, 3), "token-major [N, H, C]")
    shape = (block_size_ratio, heads, tokens // block_size_ratio, content)
    apply(Reshape(shape, (0, 2, 1, 3), _itemsize(cache)), cache, indices)


def kv_postprocess_cpu_attention_on_receive(cache: Tensor, indices: Pages, block_size_ratio: int) -> None:
    """Turns ``r`` small blocks of vLLM's CPU attention that landed one after another into one, in place.

    CPU attention (``vec`` packing) keeps, per head, the keys transposed ``[D, N]``, then the values
    ``[N, D]``.
    Landing order: whole small blocks one after another, ``(r, H, {K [D, n], V [n, D]})``. A block becomes
    ``(H, {K [D, r * n], V [r * n, D]})`` in two exact steps: ``(r, H, 2, D*n) -> (H, 2, r, D*n)`` over the
    block, which finishes the values, then ``(r, D, n) -> (D, r, n)`` over the keys of each head. A reader
    that places the small keys and values of a head straight into that head needs only the second step
    (``cpu_key_reshape``).

    Args:
        cache: ``[num_blocks, H, N, 2 * D]``, contiguous inside a block.
        indices: the distinct blocks just received.
        block_size_ratio: ``r``, tokens of a local block over tokens of a remote block.

    Raises:
        ReshapeError: ``r`` does not divide ``N``, the content is odd, or a block is not dense.
    """
    _, heads, tokens, content = _block_shape(cache, block_size_ratio)
    if content % 2:
        raise ReshapeError(f"a CPU attention block holds keys and values of one size, got content size {content}")
    _require_order(cache, (1, 2, 3), "head-major [H, N, 2D]")
    size, half = _itemsize(cache), content // 2
    small = half * tokens // block_size_ratio
    apply(Reshape((block_size_ratio, heads, 2, small), (1, 2, 0, 3), size), cache, indices)
    apply(cpu_key_reshape(heads, tokens, half, block_size_ratio, size), cache, indices)


def cpu_key_reshape(heads: int, tokens: int, head_size: int, block_size_ratio: int, itemsize: int) -> Reshape:
    """Describes the keys of a CPU attention page whose ``r`` small ``[D, n]`` pieces lie head by head.

    Per head ``(r, D, n) -> (D, r, n)`` over the first half of the head; the values behind them stay.
    """
    return Reshape(
        (block_size_ratio, head_size, tokens // block_size_ratio),
        (1, 0, 2),
        itemsize,
        stride=2 * tokens * head_size * itemsize,
        count=heads,
    )


def copy_kv_blocks(
    src_caches: Mapping[str, torch.Tensor],
    dst_caches: Mapping[str, torch.Tensor],
    src_ids: Sequence[int],
    dst_ids: Sequence[int],
    direction: Literal["h2d", "d2h"],
) -> None:
    """Copies block ``src_ids[i]`` to block ``dst_ids[i]`` of every layer, between host and device.

    Neighbouring blocks are copied together, scattered ones staged ``STAGED_BLOCKS`` at a time. Does nothing if
    any argument is empty or the id lists differ in length. When it returns, host memory may be read (``d2h``)
    or reused (``h2d``).

    Args:
        src_caches: layer name to tensor ``[num_blocks, ...]``.
        dst_caches: the same layers with blocks of the same shape and dtype.
        src_ids: blocks to read.
        dst_ids: blocks to write.
        direction: ``h2d`` host to device, ``d2h`` device to host.

    Raises:
        ReshapeError: another direction, a layer missing from ``dst_caches``, blocks that differ in shape or
            dtype, or a block id out of range; nothing has been copied then.
    """
    if not src_caches or not dst_caches or not src_ids or not dst_ids or len(src_ids) != len(dst_ids):
        return
    if direction not in {"h2d", "d2h"}:
        raise ReshapeError(f"direction must be 'h2d' or 'd2h', got {direction!r}")
    for layer, source in src_caches.items():
        _check_copy(layer, source, dst_caches.get(layer), (src_ids, dst_ids))
    runs = _runs(src_ids, dst_ids)
    for layer, source in src_caches.items():
        if len(runs) * SCATTERED_RUN > len(src_ids):
            _copy_staged(source, dst_caches[layer], src_ids, dst_ids)
            continue
        for first, into, length in runs:
            dst_caches[layer][into : into + length].copy_(source[first : first + length])


def _copy_staged(source: torch.Tensor, target: torch.Tensor, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
    import torch

    for start in range(0, len(src_ids), STAGED_BLOCKS):
        part = slice(start, start + STAGED_BLOCKS)
        rows = torch.tensor(src_ids[part], device=source.device)
        target[torch.tensor(dst_ids[part], device=target.device)] = source[rows].to(target.device)


def _runs(src_ids: Sequence[int], dst_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Merges neighbouring pairs into (first source, first target, blocks)."""
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(src_ids, dst_ids, strict=True):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((int(source), int(target), 1))
    return runs


def _check_copy(
    layer: str,
    source: torch.Tensor,
    target: torch.Tensor | None,
    ids: tuple[Sequence[int], Sequence[int]],
) -> None:
    if target is None:
        raise ReshapeError(f"layer {layer} has no destination cache")
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ReshapeError(
            f"layer {layer}: source blocks are {tuple(source.shape[1:])} of {source.dtype}, destination "
            f"blocks {tuple(target.shape[1:])} of {target.dtype}"
        )
    for cache, listed, side in ((source, ids[0], "source"), (target, ids[1], "destination")):
        if min(listed) < 0 or max(listed) >= cache.shape[0]:
            raise ReshapeError(
                f"layer {layer}: {side} block ids {min(listed)}..{max(listed)} leave 0..{cache.shape[0] - 1}"
            )


def _block_shape(cache: Tensor, ratio: int) -> tuple[int, int, int, int]:
    shape = tuple(int(n) for n in cache.shape)
    if len(shape) != 4:
        raise ReshapeError(f"cache must be [num_blocks, H, N, C], got shape {shape}")
    if ratio < 1 or shape[2] % ratio:
        raise ReshapeError(f"block size ratio {ratio} does not divide the {shape[2]} tokens of a block {shape[1:]}")
    return shape[0], shape[1], shape[2], shape[3]


def _require_order(cache: Tensor, order: tuple[int, int, int], name: str) -> None:
    """Raises unless the axes of a block lie in memory in this order, outermost first."""
    strides = memory_strides(cache)
    steps = [strides[axis] for axis in order if cache.shape[axis] > 1]
    if steps != sorted(steps, reverse=True):
        raise ReshapeError(f"blocks must be {name} in memory, got shape {tuple(cache.shape)} with strides {strides}")


def _itemsize(cache: Tensor) -> int:
    return int(cache.dtype.itemsize)
