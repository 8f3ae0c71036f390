"""Which remote ranks a local rank reads: pure arithmetic on parallel sizes, no layout and no bytes.

Two views of the same question live here. ``TransferTopology`` answers it in the vocabulary of vLLM's class of
that name. ``EngineShape`` with ``select_sources`` and ``consumers_of`` answers it for every pair of engines.

Ranks of one pipeline stage are counted ``rank = part * dcp_size + dcp_rank``: a *part* is one share of the kv
heads, and its ``dcp_size`` ranks split the tokens of those heads. Two conventions for ``tp_size`` occur:

* decode context parallel *within* TP (vLLM): a stage has ``tp_size`` ranks and ``tp_size / dcp_size`` parts;
* *across* TP (``dcp_across_tp=True``): a stage has ``tp_size * dcp_size`` ranks and ``tp_size`` parts.

Position ``p`` of a sequence is on dcp rank ``(p // interleave) % dcp_size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from kvrdma.errors import TopologyError
from kvrdma.token_shares import MAX_HEADS, MAX_INTERLEAVE, MAX_RANKS, dcp_overlap, require_size


@dataclass(frozen=True)
class EngineTransferInfo:
    """What the handshake learned about one pipeline stage of a remote engine.

    Attributes:
        remote_tp_size: ranks of one pipeline stage.
        remote_block_len: bytes of one block of one layer.
        remote_block_size: tokens of one block.
        remote_physical_blocks_per_logical: kernel blocks in one block of the block manager.
        remote_pp_rank: the pipeline stage this describes.
        start_layer: global index of the stage's first layer.
        end_layer: global index after the stage's last layer.
        remote_dcp_size: decode context parallel size.
    """

    remote_tp_size: int
    remote_block_len: int
    remote_block_size: int
    remote_physical_blocks_per_logical: int
    remote_pp_rank: int = 0
    start_layer: int = 0
    end_layer: int = 0
    remote_dcp_size: int = 1


@dataclass
class TransferTopology:
    """Holds this rank's identity and every remote engine's, and derives who reads whom.

    Raises ``TopologyError`` for sizes below 1 or a rank outside ``range(tp_size)``.

    Attributes:
        tp_rank: this rank in its stage.
        tp_size: ranks of the stage.
        block_size: tokens of a local block.
        engine_id: this engine's name.
        is_mla: one latent instead of kv heads, held by every rank.
        is_mamba: the model keeps state beside or instead of attention caches.
        total_num_kv_heads: kv heads of the model.
        attn_backends: attention backend classes in use; kept for the caller.
        dcp_size: decode context parallel size.
        tensor_shape: shape of a registered cache tensor; kept for the caller.
    """

    tp_rank: int
    tp_size: int
    block_size: int
    engine_id: str
    is_mla: bool
    is_mamba: bool
    total_num_kv_heads: int
    attn_backends: Sequence[type]
    dcp_size: int = 1
    tensor_shape: Sequence[int] | None = None
    _engines: dict[tuple[str, int], EngineTransferInfo] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.dcp_size < 1 or not 0 <= self.tp_rank < self.tp_size:
            raise TopologyError(
                f"engine {self.engine_id}: need tp_size >= 1, dcp_size >= 1 and 0 <= tp_rank < tp_size, got "
                f"tp_size {self.tp_size}, dcp_size {self.dcp_size}, tp_rank {self.tp_rank}"
            )

    @property
    def local_physical_heads(self) -> int:
        """Kv heads in this rank's cache."""
        return max(1, self.total_num_kv_heads // self.tp_size)

    @property
    def dcp_rank(self) -> int:
        """Which share of the tokens this rank holds."""
        return self.tp_rank % self.dcp_size

    @property
    def local_replicates_kv_cache(self) -> bool:
        """Whether several local ranks hold the same bytes."""
        return self.is_mla or self.tp_size > self.total_num_kv_heads

    def register_remote_engine(self, remote_engine_id: str, info: EngineTransferInfo) -> EngineTransferInfo:
        """Keep what is known of one stage of a remote engine; the first registration wins.

        Returns:
            What is stored, which is not ``info`` if the stage was known already.

        Raises:
            TopologyError: ``remote_engine_id`` is this engine.
        """
        if remote_engine_id == self.engine_id:
            raise TopologyError(
                f"engine {self.engine_id} cannot register itself as remote (tp_rank {self.tp_rank}): "
                f"give each engine its own engine_id"
            )
        return self._engines.setdefault((remote_engine_id, info.remote_pp_rank), info)

    def get_engine_info(self, remote_engine_id: str, remote_pp_rank: int = 0) -> EngineTransferInfo:
        """Look up one stage of a remote engine.

        Raises:
            KeyError: it is not registered.
        """
        return self._engines[(remote_engine_id, remote_pp_rank)]

    def unregister_remote_engine(self, remote_engine_id: str) -> None:
        """Forget every stage of a remote engine; unknown engines are ignored."""
        for key in [key for key in self._engines if key[0] == remote_engine_id]:
            del self._engines[key]

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Compare TP sizes: ``local // remote`` where local is not smaller, else ``-(remote // local)``.

        Raises:
            TopologyError: the larger size is not a multiple of the smaller.
        """
        require_size("remote tp size", remote_tp_size, MAX_RANKS)
        small, large = sorted((self.tp_size, remote_tp_size))
        if small < 1 or large % small:
            raise TopologyError(
                f"local tp size {self.tp_size} and remote tp size {remote_tp_size} do not divide each other: "
                "select_sources() serves such pairs"
            )
        ratio = large // small
        return ratio if self.tp_size >= remote_tp_size else -ratio

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Count the remote blocks that fill one local block.

        Raises:
            TopologyError: the local block size is not a multiple of the remote one.
        """
        if remote_block_size < 1 or self.block_size % remote_block_size:
            raise TopologyError(
                f"local block size {self.block_size} is not a multiple of remote block size "
                f"{remote_block_size}; plan_reads() serves such pairs by token ranges"
            )
        return self.block_size // remote_block_size

    def is_kv_replicated(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Whether the remote engine has more ranks than kv heads."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return info.remote_tp_size > self.total_num_kv_heads

    def replicates_kv_cache(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Whether several remote ranks hold the same bytes."""
        return self.is_mla or self.is_kv_replicated(remote_engine_id, remote_pp_rank)

    def dcp_source_ranks(self, remote_tp_size: int, remote_dcp_size: int) -> list[int]:
        """List the remote ranks whose token share overlaps this rank's (equal interleave, dividing sizes).

        Raises:
            TopologyError: a size is below 1 or above any engine's.
        """
        require_size("remote tp size", remote_tp_size, MAX_RANKS)
        require_size("remote dcp size", remote_dcp_size, MAX_RANKS)
        if self.dcp_size <= remote_dcp_size:
            return list(range(self.dcp_rank, remote_tp_size, self.dcp_size))
        return [self.dcp_rank % remote_dcp_size]

    def handshake_target_ranks(self, remote_tp_size: int, remote_dcp_size: int = 1) -> list[int]:
        """List the remote ranks to ask for their layout; needs no registration.

        Raises:
            TopologyError: the remote is not sharded by dcp and the TP sizes do not divide one another.
        """
        if remote_dcp_size > 1:
            return self.dcp_source_ranks(remote_tp_size, remote_dcp_size)
        return self._tp_source_ranks(remote_tp_size)

    def _tp_source_ranks(self, remote_tp_size: int) -> list[int]:
        ratio = self.tp_ratio(remote_tp_size)
        if ratio > 0:
            return [self.tp_rank // ratio]
        return list(range(self.tp_rank * -ratio, (self.tp_rank + 1) * -ratio))

    def dcp_consumer_count(self, remote_tp_size: int, remote_dcp_size: int) -> int:
        """Count the local ranks that read one given remote rank: the done messages it waits for.

        Raises:
            TopologyError: as ``tp_ratio`` where the remote is not sharded by dcp.
        """
        if remote_dcp_size == 1:
            return max(1, self.tp_ratio(remote_tp_size))
        if self.dcp_size == 1:
            return self.tp_size
        return max(1, self.dcp_size // remote_dcp_size)

    def target_remote_ranks(self, remote_engine_id: str, remote_pp_rank: int = 0) -> list[int]:
        """List the ranks of a registered stage that this rank reads by TP alone.

        Raises:
            KeyError: the stage is not registered.
            TopologyError: the TP sizes do not divide one another.
        """
        return self._tp_source_ranks(self.get_engine_info(remote_engine_id, remote_pp_rank).remote_tp_size)

    def describe(self, remote_engine_id: str, remote_pp_rank: int = 0) -> str:
        """Summarise the pair in one line for the log."""
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        values = {
            "tp_ratio": self.tp_ratio(info.remote_tp_size),
            "num_kv_heads": 1 if self.is_mla else self.total_num_kv_heads,
            "local_tp": self.tp_size,
            "remote_tp": info.remote_tp_size,
            "remote_pp": remote_pp_rank,
            "local_dcp": self.dcp_size,
            "remote_dcp": info.remote_dcp_size,
            "local_rank": self.tp_rank,
            "remote_block_len": info.remote_block_len,
        }
        return f"TransferTopology({', '.join(f'{name}={value}' for name, value in values.items())})"


class RankId(NamedTuple):
    """Names one rank of an engine."""

    pp_rank: int
    rank: int


class Source(NamedTuple):
    """Says what one consumer rank reads from one producer rank: ``heads`` is ``[lo, hi)`` in the model."""

    rank: RankId
    heads: tuple[int, int]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Describes how an engine splits its KV cache over ranks; the module docstring defines the ranks.

    Raises ``TopologyError`` where sizes are below 1 or above any engine's (``MAX_RANKS``, ``MAX_HEADS``), dcp does
    not divide TP, or heads and parts do not divide one another.

    Attributes:
        tp_size: tensor parallel size.
        num_kv_heads: kv heads of the model; ignored for MLA, which counts as one head.
        dcp_size: decode context parallel size.
        interleave: consecutive positions on one dcp rank.
        is_mla: whether the cache is one latent per token.
        dcp_across_tp: whether ``tp_size`` counts parts only instead of all ranks of a stage.
        stages: names of the layers of each pipeline stage; empty: one stage with every layer.
    """

    tp_size: int
    num_kv_heads: int
    dcp_size: int = 1
    interleave: int = 1
    is_mla: bool = False
    dcp_across_tp: bool = False
    stages: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        require_size("tp_size", self.tp_size, MAX_RANKS)
        require_size("num_kv_heads", self.num_kv_heads, MAX_HEADS)
        require_size("dcp_size", self.dcp_size, MAX_RANKS)
        require_size("interleave", self.interleave, MAX_INTERLEAVE)
        if not self.dcp_across_tp and self.tp_size % self.dcp_size:
            raise TopologyError(
                f"dcp size {self.dcp_size} does not divide tp size {self.tp_size}: if dcp multiplies ranks "
                "instead of splitting TP, say dcp_across_tp=True"
            )
        small, large = sorted((self.total_heads, self.parts))
        if large % small:
            raise TopologyError(
                f"{self.total_heads} kv heads, {self.parts} parts (tp {self.tp_size}, dcp {self.dcp_size}): "
                "one must divide the other"
            )
        if max(1, len(self.stages)) * self.num_ranks > MAX_RANKS:
            raise TopologyError(
                f"{max(1, len(self.stages))} stages of {self.num_ranks} ranks (tp {self.tp_size}, dcp {self.dcp_size}) "
                f"are more than the {MAX_RANKS} ranks that an engine may have"
            )

    @property
    def total_heads(self) -> int:
        """Heads to share out: 1 for MLA."""
        return 1 if self.is_mla else self.num_kv_heads

    @property
    def parts(self) -> int:
        """Shares of the kv heads, replicas included."""
        return self.tp_size if self.dcp_across_tp else self.tp_size // self.dcp_size

    @property
    def num_ranks(self) -> int:
        """Ranks of one stage."""
        return self.parts * self.dcp_size

    @property
    def replicas(self) -> int:
        """Parts that hold the same head."""
        return max(1, self.parts // self.total_heads)

    def dcp_rank(self, rank: int) -> int:
        """Token share of a rank."""
        return rank % self.dcp_size

    def heads(self, rank: int) -> tuple[int, int]:
        """Kv heads ``[lo, hi)`` of a rank.

        Raises:
            TopologyError: no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise TopologyError(f"rank {rank} is outside the {self.num_ranks} ranks of a stage of {self}")
        part = rank // self.dcp_size
        lo = part * self.total_heads // self.parts
        return lo, lo + max(1, self.total_heads // self.parts)

    def all_ranks(self) -> list[RankId]:
        """Every rank of every stage."""
        return [RankId(pp, rank) for pp in range(max(1, len(self.stages))) for rank in range(self.num_ranks)]


def _source_part(remote: EngineShape, head: int, share: int, shares: int) -> int:
    """The remote part that serves one head to the ``share``-th of ``shares`` equal readers."""
    if remote.parts < remote.total_heads:
        return head // (remote.total_heads // remote.parts)
    return head * remote.replicas + share * remote.replicas // shares


def _shares_layer(local: EngineShape, local_pp: int, remote: EngineShape, remote_pp: int) -> bool:
    if not local.stages or not remote.stages:
        return True
    return not set(local.stages[local_pp]).isdisjoint(remote.stages[remote_pp])


def select_sources(local: EngineShape, local_rank: RankId, remote: EngineShape) -> tuple[Source, ...]:
    """Choose the remote ranks that together hold what ``local_rank`` needs, each head and token once.

    Replicas of a head are spread evenly over the readers of that head, in rank order.

    Returns:
        Sources ordered by (stage, rank), with the heads to take from each.

    Raises:
        TopologyError: the engines disagree on the number of kv heads, or the rank does not exist.
    """
    if local.total_heads != remote.total_heads:
        raise TopologyError(
            f"local engine has {local.total_heads} kv heads, remote {remote.total_heads}: not the same model"
        )
    lo, hi = local.heads(local_rank.rank)
    shares = local.replicas * local.dcp_size
    parts: dict[int, list[int]] = {}
    for head in range(lo, hi):
        part = _source_part(remote, head, local_rank.rank % shares, shares)
        parts.setdefault(part, []).append(head)
    mine = (local.dcp_rank(local_rank.rank), local.dcp_size, local.interleave)
    return tuple(
        Source(RankId(pp, part * remote.dcp_size + dcp), (heads[0], heads[-1] + 1))
        for pp in range(max(1, len(remote.stages)))
        if _shares_layer(local, local_rank.pp_rank, remote, pp)
        for part, heads in parts.items()
        for dcp in dcp_overlap(mine, remote.dcp_size, remote.interleave)
    )


def consumers_of(producer: EngineShape, rank: RankId, consumer: EngineShape) -> frozenset[RankId]:
    """Name the consumer ranks a producer rank must hear from before it may release a request's blocks.

    The set does not depend on the prompt: a rank whose slice of a short prompt is empty still reports. It is
    empty for a replica that nobody reads, which releases at once.
    """
    return _readers(producer, consumer).get(rank, frozenset())


@lru_cache(maxsize=64)
def _readers(producer: EngineShape, consumer: EngineShape) -> dict[RankId, frozenset[RankId]]:
    """The consumer ranks that read each producer rank, for all of them at once: who asks of one asks of many."""
    found: dict[RankId, set[RankId]] = {}
    for reader in consumer.all_ranks():
        for source in select_sources(consumer, reader, producer):
            found.setdefault(source.rank, set()).add(reader)
    return {rank: frozenset(readers) for rank, readers in found.items()}
