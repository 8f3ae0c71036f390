"""KV through host memory, for accelerators whose memory no transport can read (``kv_buffer_device=cpu``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvrdma.reshape import copy_kv_blocks

if TYPE_CHECKING:
    from kvrdma.connector.layouts import Caches


class HostStaging:
    """A copy of every exchanged cache in host memory, of the same shape: block ids mean the same in both."""

    def __init__(self, caches: Caches, num_blocks: int) -> None:
        """Allocate it, pinned where the caches are on a GPU.

        Args:
            caches: on the accelerator.
            num_blocks: as block ids count; a cache may hold each as several kernel blocks.
        """
        import torch

        self._caches = caches
        self._num_blocks = num_blocks
        self.tensors: dict[str, Any] = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            for name, tensor in caches.tensors.items()
        }

    def to_host(self, blocks: Sequence[Sequence[int]]) -> None:
        """Copy blocks, one list per KV group, before they are published. Waits until they are there."""
        for group, ids in enumerate(blocks):
            for pages, device, host in self._pages(group, ids):
                copy_kv_blocks(device, host, pages, pages, "d2h")

    def to_device(self, blocks: Sequence[Sequence[int]]) -> None:
        """Copy blocks, one list per KV group, that have been pulled."""
        for group, ids in enumerate(blocks):
            for pages, device, host in self._pages(group, ids):
                copy_kv_blocks(host, device, pages, pages, "h2d")

    def _pages(self, group: int, ids: Sequence[int]) -> list[tuple[list[int], dict[str, Any], dict[str, Any]]]:
        """Group a KV group's layers by kernel blocks per block; give their page ids, caches and copies."""
        by_ratio: dict[int, list[str]] = {}
        for name, spec in self._caches.specs.items():
            if spec.group == group:
                by_ratio.setdefault(self.tensors[name].shape[0] // self._num_blocks, []).append(name)
        return [
            (
                [block * ratio + page for block in ids for page in range(ratio)],
                {name: self._caches.tensors[name] for name in names},
                {name: self.tensors[name] for name in names},
            )
            for ratio, names in by_ratio.items()
        ]
