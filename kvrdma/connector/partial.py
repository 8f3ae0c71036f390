"""Blocks that a load fills from inside only: their beginning was behind the producer's sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from kvrdma.connector.metadata import GroupSpan


class PartialBlocks:
    """Keeps them out of the prefix cache, where shorter prompts would take them for whole."""

    def __init__(self) -> None:
        """Start with none."""
        self.pool: BlockPool | None = None
        """vLLM's, once there is one."""
        self._spans: dict[str, Sequence[GroupSpan]] = {}
        self._hidden: set[str] = set()

    def __len__(self) -> int:
        return len(self._spans)

    def loading(self, request_id: str, spans: Sequence[GroupSpan]) -> None:
        """Note a load, if any of its blocks is such a one."""
        if any(span.cut for span in spans):
            self._spans[request_id] = spans

    def allocated(self, request_id: str) -> None:
        """Hide a request's blocks for good: vLLM has cached them, and caches no block of a request twice."""
        if request_id in self._spans and request_id not in self._hidden:
            self._hide(request_id)
            self._hidden.add(request_id)

    def hide(self) -> None:
        """Hide what vLLM may have cached in this step, of requests that then found no room to go on."""
        for request_id in self._spans.keys() - self._hidden:
            self._hide(request_id)

    def first_tokens(self, request_id: str, first: Sequence[int]) -> tuple[int, ...]:
        """Correct the first position that this engine has of a request, per exchanged group."""
        spans = self._spans.get(request_id)
        if spans is None:
            return tuple(first)
        return tuple(max(n, span.tokens.start) if span.cut else n for n, span in zip(first, spans, strict=True))

    def forget(self, request_id: str) -> None:
        """Note that a request is over, or that its load failed and its blocks are computed here."""
        self._spans.pop(request_id, None)
        self._hidden.discard(request_id)

    def _hide(self, request_id: str) -> None:
        if self.pool is not None:
            self.pool.evict_blocks({span.ids[0] for span in self._spans[request_id] if span.cut})
