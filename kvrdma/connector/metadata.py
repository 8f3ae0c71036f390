"""What the scheduler side and the worker side of the connector tell each other; all of it is pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvrdma.lease import LeaseKey
from kvrdma.plan import TokenRange
from kvrdma.reference import PullReference
from kvrdma.wire import RankDescription


@dataclass(frozen=True, slots=True)
class Publication:
    """A finished request whose blocks every rank publishes under the same lease."""

    request_id: str
    lease: LeaseKey
    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    """Per KV group; empty unless ranks stage blocks in host memory."""
    lease_s: float | None = None
    """Other than the setting, for requests kept for a next turn."""
    first_blocks: tuple[int, ...] = ()
    """Per KV group, where there are blocks: which block of the sequence the first one is (sliding windows)."""


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """Local blocks of one KV group: ids, the block of the sequence that the first one is, and what to read."""

    ids: tuple[int, ...]
    first: int
    tokens: TokenRange
    cut: bool = False
    """The producer no longer has the beginning of the first block."""


@dataclass(frozen=True, slots=True)
class Load:
    """A request to pull."""

    request_id: str
    reference: PullReference
    groups: tuple[GroupSpan, ...]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """What the workers have to do, collected since the last step."""

    discard: list[LeaseKey] = field(default_factory=list)
    """Prepared leases of requests that are not offered."""
    prepare: list[LeaseKey] = field(default_factory=list)
    """Leases of requests whose prefill begins: their words are live before anybody is told of them."""
    publish: list[Publication] = field(default_factory=list)
    hold: list[tuple[str, PullReference]] = field(default_factory=list)
    """Requests that wait to be scheduled: keep their producer's lease alive."""
    load: list[Load] = field(default_factory=list)
    decline: list[PullReference] = field(default_factory=list)
    """Release the producer; these are never reported."""
    abort: list[str] = field(default_factory=list)
    """Loads under way that nobody wants any more."""

    def __bool__(self) -> bool:
        begun = self.prepare or self.publish or self.hold or self.load
        return bool(begun or self.discard or self.decline or self.abort)


NO_WORK = StepMetadata()
"""Of the steps that bring no work, which are nearly all; never added to."""


@dataclass(slots=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """One rank's description, on its way to the scheduler that answers for all ranks."""

    packed: bytes

    @classmethod
    def of(cls, description: RankDescription) -> RankHandshake:
        """Pack a description."""
        return cls(msgspec.msgpack.encode(description))

    def description(self) -> RankDescription:
        """Unpack it."""
        return msgspec.msgpack.decode(self.packed, type=RankDescription)


@dataclass(slots=True)
class LoadBlame(KVConnectorWorkerMetadata):
    """Requests whose load failed through the fault of their producer: it counts for its circuit breaker."""

    request_ids: frozenset[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LoadBlame:
        """Join what two ranks say."""
        assert isinstance(other, LoadBlame)
        return LoadBlame(self.request_ids | other.request_ids)
