"""Which blocks of a request are exchanged, per KV group: full attention, windows, state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec, iter_layer_specs

from kvrdma.blocks import clip_ssm_state_blocks
from kvrdma.connector.metadata import GroupSpan
from kvrdma.plan import BlockSpan, TokenRange

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class _Group:
    index: int
    """In vLLM's list of all groups."""
    tokens_per_block: int
    """Over all context-parallel ranks."""
    window: int = 0
    chunk: int = 0
    spec_blocks: int | None = None
    """Scratch blocks behind a state; None: no state."""


class TransferGroups:
    """The KV groups that are exchanged, in vLLM's order."""

    def __init__(self, kv_cache_config: KVCacheConfig, dcp_size: int = 1) -> None:
        """Read what matters off vLLM's specs."""
        groups = list(kv_cache_config.kv_cache_groups)
        self.ids = transfer_group_ids(kv_cache_config)
        self._groups = tuple(_group(index, groups[index].kv_cache_spec, dcp_size) for index in self.ids)
        self.has_state = any(group.spec_blocks is not None for group in self._groups)
        self.has_window = any(group.window or group.chunk for group in self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def to_publish(self, block_ids: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Pick the blocks to offer: ids per group, and which block of the sequence the first of each is."""
        ids: list[tuple[int, ...]] = []
        first: list[int] = []
        for group in self._groups:
            mine = block_ids[group.index]
            if group.spec_blocks is not None:
                ids.append(tuple(clip_ssm_state_blocks(mine, group.spec_blocks)))
                first.append(0)
            else:
                span = BlockSpan.without_null(mine)
                ids.append(tuple(span.ids))
                first.append(span.first)
        return tuple(ids), tuple(first)

    def first_tokens(self, first_blocks: Sequence[int]) -> tuple[int, ...]:
        """Translate which block of the sequence is the first, per group, into its first position."""
        return tuple(n * group.tokens_per_block for n, group in zip(first_blocks, self._groups, strict=True))

    def to_load(
        self, block_ids: Sequence[Sequence[int]], tokens: TokenRange, theirs: Sequence[int | None]
    ) -> tuple[GroupSpan, ...]:
        """Pick the blocks to fill with positions ``tokens``: of windows only the last, and those whole.

        vLLM's prefix cache hands a window's first block to shorter prompts too, which see more of its beginning.

        Args:
            block_ids: the request's, for every KV group of vLLM's.
            tokens: what to load.
            theirs: per exchanged group, the first position that the producer still has; None where it does not say.
        """
        spans: list[GroupSpan] = []
        for group, first in zip(self._groups, theirs, strict=True):
            mine = block_ids[group.index]
            if group.spec_blocks is not None:
                spans.append(GroupSpan(tuple(clip_ssm_state_blocks(mine, group.spec_blocks)), 0, tokens))
                continue
            visible, each = _first_visible(group, tokens.end), group.tokens_per_block
            start = max(tokens.start, visible // each * each, visible if first is None else min(visible, first))
            lo, hi = start // each, -(-tokens.end // each)
            cut = start > tokens.start and start % each > 0
            spans.append(GroupSpan(tuple(mine[lo:hi]), lo, TokenRange(start, tokens.end), cut))
        return tuple(spans)


def transfer_group_ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Ids of the groups that take part in transfers; all of them where vLLM does not tell."""
    ids = getattr(kv_cache_config, "transfer_group_ids", None)
    return tuple(range(len(kv_cache_config.kv_cache_groups))) if ids is None else tuple(ids)


def _group(index: int, spec: object, dcp_size: int) -> _Group:
    first = next(iter(iter_layer_specs(spec)))
    if isinstance(first, MambaSpec):
        return _Group(index, first.block_size, spec_blocks=first.num_speculative_blocks)
    tokens = first.block_size * dcp_size
    if isinstance(first, SlidingWindowSpec):
        return _Group(index, tokens, window=first.sliding_window)
    if isinstance(first, ChunkedLocalAttentionSpec):
        return _Group(index, tokens, chunk=first.attention_chunk_size)
    return _Group(index, tokens)


def _first_visible(group: _Group, position: int) -> int:
    """The first position that the token at ``position`` attends to."""
    if group.window:
        return max(0, position - group.window + 1)
    return position // group.chunk * group.chunk if group.chunk else 0
