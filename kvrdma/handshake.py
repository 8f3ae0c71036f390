"""The handshake, without sockets: what is said of a rank, what is asked for, and whether two sides fit."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

import msgspec

from kvrdma.errors import ConfigError, IncompatibleError, LayoutError, TopologyError
from kvrdma.layout import KVLayout
from kvrdma.reference import PullReference
from kvrdma.topology import EngineShape, RankId, Source, consumers_of, select_sources
from kvrdma.transport import Capabilities
from kvrdma.wire import RankDescription

MAX_RANKS = 4096
MAX_NAME = 256
"""Characters of ``wire.Name``."""
_MAX_LAYOUT_BYTES = 16 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KVLayout)


@dataclass(frozen=True, slots=True)
class Identity:
    """Which rank of which engine this process is, and what its peers have to have in common with it."""

    engine_id: str
    """Shared by all ranks of the engine and by no other engine."""
    shape: EngineShape
    rank: RankId = field(default_factory=lambda: RankId(0, 0))
    model: Mapping[str, str] = field(default_factory=dict)
    """Field to value, e.g. ``{"model": "...", "weights": "sha256:..."}``; compared field by field."""

    def __post_init__(self) -> None:
        """Refuse names that no message holds, and ranks that the engine does not have: nobody would find such a one.

        Raises:
            ConfigError: names what.
            TopologyError: the rank is none of the shape's.
        """
        if not _is_name(self.engine_id) or not self.engine_id:
            raise ConfigError(f"engine_id must be a text of 1 to {MAX_NAME} characters, got {self.engine_id!r:.80}")
        check_model(self.model)
        _check_rank(self.shape, self.rank)


def _check_rank(shape: object, rank: object) -> None:
    if not isinstance(shape, EngineShape):
        raise TopologyError(f"shape must be an EngineShape, got {shape!r:.80}")
    if not isinstance(rank, RankId) or {*map(type, rank)} != {int}:
        raise TopologyError(f"rank must be a RankId of two whole numbers (pp_rank, rank), got {rank!r:.80}")
    stages = max(1, len(shape.stages))
    if rank.pp_rank not in range(stages) or rank.rank not in range(shape.num_ranks):
        raise TopologyError(
            f"{rank} is outside the {stages} stages of {shape.num_ranks} ranks of its engine (tp {shape.tp_size}, dcp "
            f"{shape.dcp_size}): both count from 0; name the layers of each stage in EngineShape(stages=...)"
        )


def check_model(model: object) -> None:
    """Refuse a description of a model that no message holds.

    Raises:
        ConfigError: names the field.
    """
    if not isinstance(model, Mapping):
        raise ConfigError(f"model must map fields to texts, got {type(model).__name__}")
    for name, value in model.items():
        if not _is_name(name) or not _is_name(value):
            raise ConfigError(f"model: {name!r:.80}={value!r:.80} must be texts of at most {MAX_NAME} characters")


def _is_name(text: object) -> bool:
    """Whether a message takes it as a name."""
    if not isinstance(text, str) or len(text) > MAX_NAME:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character
        return False
    return True


def pack_layout(layout: KVLayout) -> bytes:
    """Serialise a layout for a peer: its layers are alike, so it compresses to a few hundred bytes."""
    return zlib.compress(_encoder.encode(layout), 6)


def unpack_layout(packed: bytes) -> KVLayout:
    """Read a peer's layout and check every number in it.

    Raises:
        LayoutError: it is damaged, too large or contradicts itself.
    """
    stream = zlib.decompressobj()
    try:
        layout = _decoder.decode(stream.decompress(packed, _MAX_LAYOUT_BYTES))
    except (zlib.error, msgspec.DecodeError, RecursionError) as error:
        raise LayoutError(f"the peer's layout cannot be read: {error}") from None
    layout.validate()
    return layout


def remote_shape(local: EngineShape, reference: PullReference) -> EngineShape:
    """Give the producer's shape as far as the reference knows it: its stages have no layers yet.

    Raises:
        TopologyError: the sizes do not fit the model's kv heads.
        IncompatibleError: there are more ranks than any engine has.
    """
    ranks = reference.tp_size * reference.pp_size * (reference.dcp_size if reference.dcp_across_tp else 1)
    if ranks > MAX_RANKS:
        raise IncompatibleError(f"the reference names an engine of {ranks} ranks, more than {MAX_RANKS}")
    return EngineShape(
        tp_size=reference.tp_size,
        num_kv_heads=local.num_kv_heads,
        dcp_size=reference.dcp_size,
        interleave=reference.interleave,
        is_mla=local.is_mla,
        dcp_across_tp=reference.dcp_across_tp,
    )


class Sizes(TypedDict):
    """What a reference says of the producer's shape."""

    tp_size: int
    dcp_size: int
    pp_size: int
    interleave: int
    dcp_across_tp: bool


def sizes_of(shape: EngineShape) -> Sizes:
    """Say in a reference how an engine is split; ``remote_shape`` reads it."""
    return Sizes(
        tp_size=shape.tp_size,
        dcp_size=shape.dcp_size,
        pp_size=max(1, len(shape.stages)),
        interleave=shape.interleave,
        dcp_across_tp=shape.dcp_across_tp,
    )


def size_numbers(shape: EngineShape) -> dict[str, int]:
    """Say the same in a rank's description, as numbers."""
    said = sizes_of(shape)
    return {
        "tp_size": said["tp_size"],
        "dcp_size": said["dcp_size"],
        "pp_size": said["pp_size"],
        "interleave": said["interleave"],
        "dcp_across_tp": int(said["dcp_across_tp"]),
    }


def with_stages(shape: EngineShape, layouts: Mapping[RankId, KVLayout], stages: int) -> EngineShape:
    """Fill in the layers of each stage, now that layouts are known."""
    if stages == 1:
        return shape
    names: list[tuple[str, ...]] = [()] * stages
    for rank, layout in layouts.items():
        names[rank.pp_rank] = tuple(layer.name for layer in layout.layers)
    return replace(shape, stages=tuple(names))


def ranks_to_ask(local: Identity, remote: EngineShape, stages: int) -> tuple[RankId, ...]:
    """Name every rank to ask about, in one message: those read, and those nobody reads but must be told.

    Until stages have told their layers, a rank may have to read from each of them.
    """
    flat_local = replace(local.shape, stages=())
    per_stage = [source.rank.rank for source in select_sources(flat_local, RankId(0, local.rank.rank), remote)]
    if is_first(local):
        per_stage += _unread(flat_local, remote)
    return tuple(RankId(stage, rank) for stage in range(stages) for rank in sorted(set(per_stage)))


def is_first(local: Identity) -> bool:
    """Whether this rank speaks for its engine to ranks that nobody reads."""
    return local.rank == (0, 0)


def _unread(local: EngineShape, remote: EngineShape) -> list[int]:
    return [rank for rank in range(remote.num_ranks) if not consumers_of(remote, RankId(0, rank), local)]


def flat_rank(shape: EngineShape, rank: RankId) -> int:
    """Number a rank within its engine."""
    return rank.pp_rank * shape.num_ranks + rank.rank


def readers_of(local: Identity, remote: EngineShape, rank: RankId) -> tuple[int, ...]:
    """Number the ranks of this engine that a producer rank must hear from; the first rank where nobody reads."""
    readers = consumers_of(remote, rank, local.shape)
    return tuple(sorted(flat_rank(local.shape, reader) for reader in readers)) or (0,)


def check_description(mine: Mapping[str, str], theirs: RankDescription, reference: PullReference) -> None:
    """Refuse a rank of another engine, of another start of it, or of another model.

    Raises:
        IncompatibleError: names the field and both values.
    """
    where = f"rank {tuple(theirs.rank)} at {theirs.host}:{theirs.port}"
    if theirs.engine_id != reference.engine_id:
        raise IncompatibleError(f"{where} belongs to engine {theirs.engine_id}, not {reference.engine_id}")
    if theirs.generation != reference.engine_generation:
        raise IncompatibleError(
            f"engine {theirs.engine_id} was restarted: {where} is of generation {theirs.generation}, the reference of "
            f"{reference.engine_generation}; its blocks are gone, compute the request again"
        )
    for name, size in theirs.sizes.items():
        said = getattr(reference, name, None)
        if said != size:
            raise IncompatibleError(f"{name} differs: reference {said!r}, {where} {size!r}: the reference was altered")
    for name in sorted({*mine, *theirs.model}):
        ours, other = mine.get(name, "(not given)"), theirs.model.get(name, "(not given)")
        if ours != other:
            raise IncompatibleError(f"{name} differs: local {ours!r}, {where} {other!r}")


def sources_for(local: Identity, remote: EngineShape) -> tuple[Source, ...]:
    """Choose what this rank reads from whom."""
    return select_sources(local.shape, local.rank, remote)


def preference(capabilities: Mapping[str, Capabilities]) -> Sequence[str]:
    """Order transports: truly one-sided first, then the nearest (a host's own memory before its network).

    Of two over one network the one that never needs the peer's CPU comes first.
    """
    reach = {"process": 0, "host": 1, "network": 2}

    def rank(name: str) -> tuple[bool, int, bool]:
        can = capabilities[name]
        return not can.one_sided, reach[can.reach], can.needs_target_progress

    return sorted(capabilities, key=rank)
