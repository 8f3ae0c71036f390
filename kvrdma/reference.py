"""``PullReference``: what the producer hands out and the consumer needs to pull a request.

It travels through proxies and clients as ``kv_transfer_params``, a JSON object with the keys of vLLM's
NixlConnector and one of ours, ``"kvrdma"``. What comes back is checked field by field: it may have passed through
anybody's hands.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvrdma.errors import MessageError, PlanError
from kvrdma.lease import LeaseKey
from kvrdma.plan import BlockSpan
from kvrdma.plan.tokens import Ints

_MAX_ID = 1 << 31

Small: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Below 2**53: JSON parsers of proxies may read numbers as doubles."""
Blocks: TypeAlias = Annotated[tuple[Small, ...], msgspec.Meta(max_length=1 << 22)]


class _Ours(msgspec.Struct, frozen=True):
    version: Annotated[int, msgspec.Meta(ge=1, le=1)]
    engine_generation: Number
    slot: Small
    lease_generation: Number
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 30.0
    first_blocks: Annotated[tuple[Small, ...], msgspec.Meta(max_length=256)] = ()
    live: bool = False


class _Params(msgspec.Struct, frozen=True):
    remote_engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_block_ids: Annotated[tuple[Blocks, ...], msgspec.Meta(max_length=256)]
    remote_num_tokens: Number
    kvrdma: _Ours
    remote_request_id: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    tp_size: Size = 1
    dcp_size: Size = 1
    pp_size: Size = 1
    interleave: Size = 1
    dcp_across_tp: bool = False


class PeerKey(msgspec.Struct, frozen=True):
    """One start of one engine, as a reference describes it.

    References come from clients, and may be altered: what leads nowhere must not stand for what does.
    """

    engine_id: str
    generation: int
    host: str
    port: int
    split: tuple[int, int, int, int, bool]
    """``tp_size``, ``dcp_size``, ``pp_size``, ``interleave`` and ``dcp_across_tp``."""


class PullReference(msgspec.Struct, frozen=True):
    """One published request, as a consumer sees it."""

    engine_id: str
    """Of the producer, the same on all its ranks."""
    engine_generation: int
    """Which start of it: another one has other leases."""
    host: str
    port: int
    """Of the side channel that speaks for the producer."""
    lease: LeaseKey
    """Which word of the fence says whether the blocks are still the request's."""
    num_tokens: int
    """Positions that the blocks hold."""
    blocks: tuple[tuple[int, ...], ...]
    """Block ids, one tuple per KV group; the same on every rank."""
    first_blocks: tuple[int, ...]
    """Per KV group: which block of the sequence the first id is."""
    request_id: str
    """The producer's name for it; for people."""
    lease_s: float = 30.0
    """How long the producer waits for a heartbeat."""
    tp_size: int = 1
    dcp_size: int = 1
    pp_size: int = 1
    interleave: int = 1
    dcp_across_tp: bool = False
    """The producer's split, as of ``kvrdma.EngineShape``."""
    live: bool = False
    """Every rank had prepared the lease, and the KV was computed, before this was given out."""

    @property
    def peer(self) -> PeerKey:
        """Everything that the connection to its engine depends on."""
        split = self.tp_size, self.dcp_size, self.pp_size, self.interleave, self.dcp_across_tp
        return PeerKey(self.engine_id, self.engine_generation, self.host, self.port, split)

    def to_params(self) -> dict[str, Any]:
        """Give the JSON-able object of ``kv_transfer_params``."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_block_ids": [list(group) for group in self.blocks],
            "remote_num_tokens": self.num_tokens,
            "tp_size": self.tp_size,
            "dcp_size": self.dcp_size,
            "pp_size": self.pp_size,
            "interleave": self.interleave,
            "dcp_across_tp": self.dcp_across_tp,
            "kvrdma": {
                "version": 1,
                "engine_generation": self.engine_generation,
                "slot": self.lease.slot,
                "lease_generation": self.lease.generation,
                "lease_s": self.lease_s,
                "first_blocks": list(self.first_blocks),
                "live": self.live,
            },
        }

    @classmethod
    def of(cls, given: AnyReference) -> PullReference:
        """Take a reference, or read it from what ``to_params`` made; raises as ``from_params``."""
        return given if isinstance(given, PullReference) else cls.from_params(given)

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> PullReference:
        """Check and read such an object.

        Raises:
            MessageError: a key is missing or malformed; names it.
        """
        if not isinstance(params, Mapping):
            raise MessageError(f"kv_transfer_params must be an object, got {type(params).__name__}")
        try:
            read = msgspec.convert(dict(params), _Params)
            for text in (read.remote_engine_id, read.remote_host, read.remote_request_id):
                text.encode()  # they go into messages and logs
        except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: half a character
            raise MessageError(f"kv_transfer_params: {error}; was it made by another connector?") from None
        first = read.kvrdma.first_blocks or (0,) * len(read.remote_block_ids)
        if len(first) != len(read.remote_block_ids):
            raise MessageError(
                f"kv_transfer_params: {len(read.remote_block_ids)} groups of block ids, {len(first)} first_blocks"
            )
        return cls(
            engine_id=read.remote_engine_id,
            engine_generation=read.kvrdma.engine_generation,
            host=read.remote_host,
            port=read.remote_port,
            lease=LeaseKey(read.kvrdma.slot, read.kvrdma.lease_generation),
            num_tokens=read.remote_num_tokens,
            blocks=read.remote_block_ids,
            first_blocks=first,
            request_id=read.remote_request_id,
            lease_s=read.kvrdma.lease_s,
            tp_size=read.tp_size,
            dcp_size=read.dcp_size,
            pp_size=read.pp_size,
            interleave=read.interleave,
            dcp_across_tp=read.dcp_across_tp,
            live=read.kvrdma.live,
        )


AnyReference: TypeAlias = PullReference | Mapping[str, Any]
"""What ``publish`` returned, or its ``to_params()``."""


def groups_of(blocks: Sequence[int] | Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Accept one list of block ids or one per KV group; give one tuple per group.

    Raises:
        PlanError: something is no block id.
    """
    return tuple(_plain(group) or tuple(_ids(group).tolist()) for group in _split(blocks))


def spans_of(blocks: Sequence[int] | Sequence[Sequence[int]] | Sequence[BlockSpan]) -> list[BlockSpan]:
    """Accept block ids as ``groups_of``, or spans; give one span per group, of copies that nobody else changes.

    Raises:
        PlanError: something is no block id, or no place in a sequence.
    """
    usual = _plain(blocks)
    return [BlockSpan(usual)] if usual else [_span(group) for group in _split(blocks)]


def _span(group: object) -> BlockSpan:
    if not isinstance(group, BlockSpan):
        return BlockSpan(_plain(group) or _ids(group))
    try:
        first = operator.index(group.first)
    except TypeError:
        raise PlanError(f"first of a block span must be a whole number, got {group.first!r:.80}") from None
    return BlockSpan(_plain(group.ids) or _ids(group.ids), first)


def id_text(request_id: Hashable) -> str:
    """Make a request id, whatever it is, into text that survives JSON; for people."""
    return str(request_id)[:4096].encode("utf-8", "replace").decode()


def _split(blocks: Sequence[Any]) -> Sequence[Any]:
    """Give what is said of each KV group."""
    flat = getattr(blocks, "ndim", 1) == 0 or isinstance(blocks, str | bytes | Mapping)
    if flat or not hasattr(blocks, "__getitem__") or not hasattr(blocks, "__len__"):
        raise PlanError(f"block ids must be a list, or one per KV group, got {blocks!r:.80}")
    if not len(blocks):
        return [blocks]
    first = blocks[0]
    if hasattr(first, "ndim"):  # an array, or a number that knows its array
        return blocks if first.ndim else [blocks]
    return blocks if hasattr(first, "__len__") or isinstance(first, BlockSpan) else [blocks]


def _plain(group: object) -> tuple[int, ...] | None:
    """Copy a list of nothing but usual block ids, as nearly all are; None where it is no such.

    Without NumPy: its first function after a rest takes a millisecond, and a caller of ``pull`` would wait for it.
    """
    if isinstance(group, list | tuple) and set(map(type, group)) == {int} and max(group) < _MAX_ID:
        return tuple(group)
    return None


def _ids(group: object) -> Ints:
    try:
        given = np.asarray(group)
    except ValueError:  # a ragged list
        given = np.empty((0, 0))
    ids = given.astype(np.int64) if given.dtype.kind in "iu" or not given.size else given
    hidden = isinstance(group, list | tuple) and bool in set(map(type, group))  # NumPy takes True for 1
    if ids.ndim != 1 or ids.dtype.kind != "i" or hidden or (ids.size and _highest(group, given) >= _MAX_ID):
        raise PlanError(f"block ids must be one list of integers below {_MAX_ID} per KV group, got {group!r:.80}")
    return ids


def _highest(group: object, given: npt.NDArray[Any]) -> int:
    """Give the highest id; a list's by itself, which after a while of other things takes a fraction of NumPy's time."""
    return max(group) if isinstance(group, list | tuple) else int(given.max())
