"""Runs the reshapes of a finished plan on the caches of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvrdma.layout import KVLayout
from kvrdma.plan import BlockSpan, ReadPlan
from kvrdma.reshape import PagedMemory, apply_at


class Limits:
    """What fits the blocks of this rank, worked out once: every publication and every pull is held against it."""

    def __init__(self, layout: KVLayout) -> None:
        """Read a layout."""
        self.only_state = all(page.kind == "state" for page in layout.formats)
        """No block holds tokens."""
        self.blocks: dict[int, int] = {}
        """Blocks of the smallest tensor, by KV group."""
        self._smallest: dict[int, int] = {}
        """Tokens of the smallest block, by KV group; 0 for state, whose blocks hold no tokens."""
        for layer in layout.layers:
            for plane in layer.planes:
                count = plane.num_pages // layer.pages_per_block
                self.blocks[layer.group] = min(count, self.blocks.get(layer.group, count))
            tokens = 0 if layout.format_of(layer).kind == "state" else layout.block_size(layer) * layout.dcp_size
            self._smallest[layer.group] = min(tokens, self._smallest.get(layer.group, tokens))
        self._block_tokens = max(map(layout.block_size, layout.layers)) * layout.dcp_size

    def tokens_held(self, blocks: Sequence[BlockSpan]) -> int:
        """Give a position that no block of any group reaches.

        A plan of more tokens cannot be made; trying would take memory for as many as the reference claims.
        """
        return max([span.first + len(span.ids) for span in blocks], default=0) * self._block_tokens

    def blocks_of(self, group: int, num_tokens: int, first: int = 0) -> int | None:
        """Say how many ids of a group a sequence's first tokens are in; None: all of them.

        What follows is not read, nor is anything of groups whose layers other ranks have.

        Args:
            group: the KV group.
            num_tokens: of the sequence, from its start on.
            first: which block of the sequence the first id is.
        """
        tokens = self._smallest.get(group)
        if tokens is None:
            return 0
        return max(0, -(-num_tokens // tokens) - first) if tokens else None


class Shaper:
    """Knows where the pages of every layer lie."""

    def __init__(self, layout: KVLayout, caches: Mapping[str, Any]) -> None:
        """Prepare for the caches that ``layout`` was made from."""
        self._memory: dict[tuple[str, int], PagedMemory] = {}
        for layer in layout.layers:
            planes, fmt = caches[layer.name], layout.format_of(layer)
            for number, plane in enumerate(layer.planes):
                if not fmt.is_dense(number):  # no plan reshapes it, and its pages may lie among one another
                    continue
                tensor = planes[number] if isinstance(planes, tuple | list) else planes
                self._memory[layer.name, number] = PagedMemory(
                    addr=layout.regions[plane.region].addr + plane.offset,
                    page_stride=plane.page_stride,
                    num_pages=plane.num_pages,
                    page_nbytes=fmt.plane_extent(number),
                    device=_cuda_index(tensor),
                )

    def finish(self, plan: ReadPlan) -> None:
        """Transpose every page that arrived in wire order; done on return, also on a GPU."""
        devices = set()
        for each in plan.reshapes:
            for name in each.layers:
                memory = self._memory[name, each.plane]
                apply_at(each.reshape, memory, each.pages)
                devices.add(memory.device)
        for device in devices - {None}:
            _synchronize(device)


def _cuda_index(tensor: Any) -> int | None:  # noqa: ANN401 - torch, NumPy or CuPy
    device = getattr(tensor, "device", None)
    if getattr(device, "type", "cpu") == "cpu" and not hasattr(device, "id"):
        return None
    index = getattr(device, "index", None)
    return int(index if index is not None else getattr(device, "id", 0))


def _synchronize(device: int | None) -> None:
    import cupy

    with cupy.cuda.Device(device):
        cupy.cuda.Stream.null.synchronize()
