"""One rank's cache in a multi-node benchmark: every word says whose it is, so that every byte can be checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvrdma.bench.cluster.scenario import Group, Scenario, layer_name
from kvrdma.bench.patterns import POISON
from kvrdma.bench.room import check_pool
from kvrdma.models import DTYPE_BYTES, stages
from kvrdma.page_format import LayerSpec
from kvrdma.topology import RankId

Words = npt.NDArray[np.uint64]
_ODD = np.uint64(0x9E3779B97F4A7C15)
_STEP = np.uint64(0xD1B54A32D192ED03)
_ELEMENTS: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def blocks_for(group: Group, tokens: int) -> int:
    """Give the blocks that a rank needs for so many tokens."""
    return -(-tokens // (group.block * group.dcp))


def block_order(scenario: Scenario, blocks: int) -> npt.NDArray[np.int64]:
    """Give the order in which blocks are handed out: the scenario's share of them at random."""
    order = np.arange(blocks)
    moved = np.random.default_rng(scenario.seed + 3).random(blocks) < scenario.fragmentation
    order[moved] = np.random.default_rng(scenario.seed + 4).permutation(order[moved])
    return order


def slots_of(scenario: Scenario, role: str) -> int:
    """Give how many requests a rank's cache holds at a time."""
    if role == "consumer":
        return scenario.arrival.concurrency
    return 2 * scenario.arrival.concurrency * -(-scenario.consumer.engines // scenario.producer.engines)


class RankCache:
    """The caches of the layers that one rank holds, for ``slots`` requests of the longest length at a time."""

    def __init__(self, scenario: Scenario, group: Group, rank: RankId, slots: int) -> None:
        """Allocate and poison.

        Raises:
            ConfigError: it does not fit into this host's memory.
        """
        kv, shape = scenario.kv, scenario.engine_shape(group)
        self._group, self._mla = group, kv.mla
        self._dcp_rank = rank.rank % group.dcp
        self._layers = list(stages(kv.layers, group.pp)[rank.pp_rank])
        part, parts = rank.rank // group.dcp, shape.parts
        total = shape.total_heads
        low = part * total // parts
        self.heads = (low, low + max(1, total // parts))
        self.total_heads = total
        self.slot_blocks = blocks_for(group, scenario.prompt.longest)
        self.blocks = slots * self.slot_blocks
        itemsize = DTYPE_BYTES[kv.dtype]
        content = kv.head_dim * (1 if kv.mla else 2)
        count = self.heads[1] - self.heads[0]
        sizes = {"B": self.blocks, "H": count, "N": group.block}
        order = "BHN" if group.layout == "HND" else "BNH"
        dims = [len(self._layers), *(sizes[axis] for axis in order), content]
        check_pool(int(np.prod(dims)) * itemsize)
        self._store = np.empty(dims, _ELEMENTS[itemsize])
        self._store.view(np.uint8)[...] = POISON
        self.tensors: dict[str, Any] = {
            layer_name(layer): self._store[i].reshape(self.blocks, group.block, content) if kv.mla else self._store[i]
            for i, layer in enumerate(self._layers)
        }
        kind: Any = "mla" if kv.mla else "attention"
        dims_text = "BNC" if kv.mla else f"{order}C"
        spec = LayerSpec(self.heads, total, group.block, kind, dims_text)
        self.specs = dict.fromkeys(self.tensors, spec)
        self._order = block_order(scenario, self.blocks)

    def slot(self, number: int, tokens: int) -> list[int]:
        """Give the block ids of a request of so many tokens in a slot."""
        first = number * self.slot_blocks
        return [int(block) for block in self._order[first : first + blocks_for(self._group, tokens)]]

    def _held(self, tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which positions this rank holds, and where each is among its own tokens."""
        each, ranks = self._group.interleave, self._group.dcp
        positions = np.arange(tokens)
        held = positions[positions // each % ranks == self._dcp_rank]
        return held, held // (each * ranks) * each + held % each

    def _rows(self, request: int, layer: int, tokens: npt.NDArray[np.int64], width: int) -> Words:
        """``[token, head, word]``, as they have to be."""
        heads = np.arange(*self.heads, dtype=np.uint64)
        base = np.uint64((request << 44) | (layer << 34))
        tags = base | heads[None, :] << np.uint64(24) | tokens.astype(np.uint64)[:, None]
        return tags[..., None] * _ODD + np.arange(width, dtype=np.uint64) * _STEP

    def _views(self) -> list[tuple[int, Words]]:
        """Per layer its words as ``[block, token, head, word]``."""
        words = self._store.view(np.uint64)
        if self._group.layout == "HND":
            words = words.transpose(0, 1, 3, 2, 4)
        return [(layer, words[i]) for i, layer in enumerate(self._layers)]

    def write(self, request: int, blocks: list[int], tokens: int) -> None:
        """Compute a request into its blocks."""
        held, mine = self._held(tokens)
        ids, slots = np.asarray(blocks)[mine // self._group.block], mine % self._group.block
        for layer, view in self._views():
            view[ids, slots] = self._rows(request, layer, held, view.shape[-1])

    def poison(self, blocks: list[int]) -> None:
        """Make blocks unlike any request."""
        axes = self._store.view(np.uint8)
        axes[:, blocks] = POISON

    def wrong_rows(self, request: int, blocks: list[int], tokens: int) -> int:
        """Count rows (one head and token of one layer) that are not the request's."""
        held, mine = self._held(tokens)
        ids, slots = np.asarray(blocks)[mine // self._group.block], mine % self._group.block
        return sum(
            int((view[ids, slots] != self._rows(request, layer, held, view.shape[-1])).any(-1).sum())
            for layer, view in self._views()
        )
