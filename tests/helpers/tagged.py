"""Caches whose every row says whose it is, and engines of several ranks over them.

A row is what one layer holds of one head and one token: keys, then values. Each half starts with generation,
request, layer, part, head and token, so a wrong byte names its cause. What nobody wrote is poison.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvrdma.config import Config
from kvrdma.engine import End, Ended, Engine, Event, PullDone, PullFailed, PullReleased
from kvrdma.errors import LeaseRevokedError
from kvrdma.handshake import Identity
from kvrdma.page_format import LayerSpec
from kvrdma.reference import PullReference
from kvrdma.topology import EngineShape, RankId
from kvrdma.transport import Transport, open_transport

Ints = npt.NDArray[np.int32]

POISON = int(np.frombuffer(b"\xa5" * 4, np.int32)[0])
PART = 8
"""int32 per half of a row."""


@dataclass(frozen=True)
class Model:
    """What both sides have in common, and how one side splits it."""

    layers: int = 2
    heads: int = 4
    block: int = 4
    blocks: int = 16
    shape: EngineShape = field(default_factory=lambda: EngineShape(1, 4))
    groups: int = 1
    """Layer ``i`` is in KV group ``i % groups``."""

    def split(self, **sizes: Any) -> Model:  # noqa: ANN401 - fields of EngineShape
        return replace(self, shape=EngineShape(**{"tp_size": 1, "num_kv_heads": self.heads, **sizes}))

    def heads_of(self, rank: RankId) -> tuple[int, int]:
        parts, part = self.shape.tp_size // self.shape.dcp_size, rank.rank // self.shape.dcp_size
        if parts >= self.heads:
            head = part * self.heads // parts
            return head, head + 1
        each = self.heads // parts
        return part * each, (part + 1) * each

    def layers_of(self, rank: RankId) -> list[int]:
        if not self.shape.stages:
            return list(range(self.layers))
        return [int(name.removeprefix("layer")) for name in self.shape.stages[rank.pp_rank]]

    def ranks(self) -> list[RankId]:
        stages = max(1, len(self.shape.stages))
        return [RankId(stage, rank) for stage in range(stages) for rank in range(self.shape.num_ranks)]


class TaggedCache:
    """The caches of one rank."""

    def __init__(self, model: Model, rank: RankId | None = None) -> None:
        rank = rank or RankId(0, 0)
        self.model = model
        self.dcp_rank = rank.rank % model.shape.dcp_size
        self.heads = model.heads_of(rank)
        count = self.heads[1] - self.heads[0]
        self.store = np.full((len(model.layers_of(rank)), model.blocks, count, model.block, 2 * PART), POISON, np.int32)
        self.tensors = {f"layer{layer}": self.store[i] for i, layer in enumerate(model.layers_of(rank))}

    def specs(self) -> dict[str, LayerSpec]:
        return {
            name: LayerSpec(
                heads=self.heads,
                total_heads=self.model.heads,
                block_size=self.model.block,
                group=int(name.removeprefix("layer")) % self.model.groups,
                dims="BHNC",
            )
            for name in self.tensors
        }

    def _held(self, tokens: range) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Which of these positions this rank holds, and where each is among its own tokens."""
        each, ranks = self.model.shape.interleave, self.model.shape.dcp_size
        held = [p for p in tokens if p // each % ranks == self.dcp_rank]
        mine = [p // (each * ranks) * each + p % each for p in held]
        return np.asarray(held, np.int64), np.asarray(mine, np.int64)

    def _rows(self, request: int, generation: int, layer: int, tokens: npt.NDArray[np.int64]) -> Ints:
        """``[token, head, 2 * PART]``, as they have to be."""
        heads = np.arange(*self.heads, dtype=np.int32)
        rows = np.zeros((len(tokens), len(heads), 2, PART), np.int32)
        rows[..., 0], rows[..., 1], rows[..., 2] = generation, request, layer
        rows[..., 3] = np.arange(2)
        rows[..., 4] = heads[:, None]
        rows[..., 5] = tokens[:, None, None]
        rows[..., 6:] = rows[..., :6].sum(-1, keepdims=True) ^ 0x5A5A5A
        return rows.reshape(len(tokens), len(heads), 2 * PART)

    def write(self, request: int, blocks: Sequence[int], tokens: range, generation: int = 1, first: int = 0) -> None:
        """Compute the request's tokens into its blocks; ``blocks[0]`` is block ``first`` of the sequence."""
        held, place = self._held(tokens)
        ids = np.asarray(blocks)[place // self.model.block - first]
        for name, tensor in self.tensors.items():
            tensor[ids, :, place % self.model.block] = self._rows(request, generation, int(name[5:]), held)

    def wrong(self, request: int, blocks: Sequence[int], tokens: range, generation: int = 1) -> list[str]:
        """Compare every row of every block with what a pull of ``tokens`` into poison has to leave behind."""
        held, place = self._held(tokens)
        ids = np.asarray(blocks, np.int64)[place // self.model.block] if len(held) else place
        found: list[str] = []
        for name, tensor in self.tensors.items():
            expected = np.full_like(tensor, POISON)
            expected[ids, :, place % self.model.block] = self._rows(request, generation, int(name[5:]), held)
            for index in np.argwhere((tensor != expected).any(-1))[:3].tolist():
                block, head, slot = index
                got, want = tensor[block, head, slot, :6].tolist(), expected[block, head, slot, :6].tolist()
                found.append(f"{name} block {block} head {head} slot {slot}: {got}, not {want}")
        return found

    def wrong_rows(self, request: int, blocks: Sequence[int], tokens: range, generation: int = 1) -> int:
        """Count the rows of these tokens that are not the request's."""
        held, place = self._held(tokens)
        ids = np.asarray(blocks)[place // self.model.block]
        return sum(
            int(
                (t[ids, :, place % self.model.block] != self._rows(request, generation, int(n[5:]), held)).any(-1).sum()
            )
            for n, t in self.tensors.items()
        )

    def poison(self, blocks: Iterable[int] | None = None) -> None:
        self.store[:, list(blocks) if blocks is not None else slice(None)] = POISON


_numbers = itertools.count(1)
SMALL = Config(lease_s=30.0, pull_timeout_s=20.0, control_timeout_s=5.0)


@dataclass
class Rank:
    """One rank: cache, engine, and what it has reported so far."""

    cache: TaggedCache
    engine: Engine
    events: list[Event] = field(default_factory=list)

    def wait_for(self, count: int = 1, timeout_s: float = 30.0) -> list[Event]:
        """Wait until ``count`` more events have come; returns them."""
        start = len(self.events)
        while len(self.events) < start + count:
            more = self.engine.wait(timeout_s)
            assert more, f"only {self.events[start:]} within {timeout_s} s: {self.engine.stats()}"
            self.events += more
        return self.events[start:]

    def pull(
        self,
        request_id: Hashable,
        reference: PullReference | Mapping[str, Any],
        blocks: Any,  # noqa: ANN401 - as Engine.pull
        **options: Any,  # noqa: ANN401
    ) -> Event:
        """Pull and wait for the end."""
        self.engine.pull(request_id, reference, blocks, **options)
        (event,) = self.wait_for()
        return event


class Side(ExitStack):
    """All ranks of one engine, in this process."""

    def __init__(
        self,
        model: Model,
        name: str = "",
        transport: str | Callable[[], Transport] = "memory",
        config: Config = SMALL,
        facts: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.name = name or f"engine{next(_numbers)}"
        self.ranks: list[Rank] = []
        leader = None
        for rank in model.ranks():
            cache = TaggedCache(model, rank)
            names = transport.split("+") if isinstance(transport, str) else []
            opened = [open_transport(each) for each in names] if isinstance(transport, str) else [transport()]
            identity = Identity(self.name, model.shape, rank, facts or {"model": "tagged"})
            engine = Engine(cache.tensors, cache.specs(), identity, config, transports=opened, leader=leader)
            self.callback(engine.close)
            leader = leader or engine.endpoint
            self.ranks.append(Rank(cache, engine))

    def publish(
        self,
        request: int,
        blocks: Sequence[int],
        tokens: int,
        generation: int = 1,
        **options: Any,  # noqa: ANN401
    ) -> PullReference:
        """Compute and publish a request on every rank."""
        reference: PullReference | None = None
        for rank in self.ranks:
            rank.cache.write(request, blocks, range(tokens), generation)
            lease = reference.lease if reference else None
            made = rank.engine.publish(request, blocks, tokens, lease=lease, **options)
            reference = reference or made
        assert reference is not None
        return reference

    def __enter__(self) -> Self:
        return self


def done(event: Event) -> PullDone:
    assert isinstance(event, PullDone), event
    return event


def failed(event: Event) -> PullFailed:
    assert isinstance(event, PullFailed), event
    return event


def ended(event: Event) -> Ended:
    assert isinstance(event, Ended), event
    return event


def released(event: Event) -> PullReleased:
    assert isinstance(event, PullReleased), event
    return event


IDLE = {"pulls": 0, "reads": 0, "held": 0, "landing": 0, "renewed": 0, "timers": 0, "connecting": 0, "quarantined": 0}


def pulls_and_is_fenced(producer: Side, consumer: Side) -> PullDone:
    """See one pull succeed, byte for byte, and another one end by the fence, in blocks 0 to 5; gives the first."""
    rank = consumer.ranks[0]
    reference = producer.publish(1, [8, 6, 7], 12)
    event = done(rank.pull(1, reference, [0, 1, 2]))
    assert rank.cache.wrong(1, [0, 1, 2], range(12)) == []
    assert ended(producer.ranks[0].wait_for()[0]).how is End.DONE
    late = producer.publish(2, [1, 2, 3], 12)
    assert producer.ranks[0].engine.withdraw(2)
    assert isinstance(failed(rank.pull(2, late, [3, 4, 5])).reason, LeaseRevokedError)
    return event


def busy(engine: Engine) -> dict[str, int]:
    """What of an engine is not empty and should be when nothing is going on."""
    stats = engine.stats()
    return {name: stats[name] for name, empty in IDLE.items() if stats[name] != empty}
