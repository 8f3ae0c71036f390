"""The connector in the scheduler's process: translates vLLM's requests into work for the ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from kvrdma.connector.directory import RankDirectory
from kvrdma.connector.exports import Exports
from kvrdma.connector.groups import TransferGroups
from kvrdma.connector.identity import engine_shape, stages_in_host_memory
from kvrdma.connector.loads import Loads
from kvrdma.connector.metadata import LoadBlame, RankHandshake, StepMetadata
from kvrdma.connector.metrics import Counts, KvRdmaStats
from kvrdma.sidechannel import Endpoint, SideChannelServer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvrdma.connector.options import ConnectorOptions

_COUNTED = tuple(each.name for each in fields(Counts))
_values = attrgetter(*_COUNTED)
_log = logging.getLogger(__name__)


class SchedulerSide:
    """One per engine. Also answers consumers that ask for the engine's ranks."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: ConnectorOptions) -> None:
        """Listen, unless this engine only consumes.

        Raises:
            ConfigError: the endpoint cannot be bound, or is open to others without a secret.
        """
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._options = options
        self._groups = TransferGroups(kv_cache_config, parallel.decode_context_parallel_size)
        self._backoff = max(1, int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0) or 0) - 1)
        self._counts = Counts()
        self._loads = Loads(
            self._groups, options, self._counts, backoff=self._backoff, expects_params=transfer.kv_role == "kv_consumer"
        )
        self.partial = self._loads.partial
        shape = engine_shape(vllm_config)
        self._exports = Exports(
            transfer.engine_id, shape, parallel.pipeline_parallel_size, self._groups, options, self._counts
        )
        self._with_blocks = stages_in_host_memory(vllm_config)
        self.step: StepMetadata | None = None
        """Work for the ranks that has gathered since the last step, if any; whoever takes it sets None."""
        self._news = False
        """Whether anything may have been counted since the last look."""
        self._told = _values(self._counts)
        self._breakers_open = 0
        self._directory = RankDirectory(transfer.engine_id)
        self._server: SideChannelServer | None = None
        if transfer.is_kv_producer or options.bidirectional:
            bind = options.scheduler_bind(parallel.data_parallel_index)
            config = options.config
            told = bind.as_told(config.advertise)
            self._server = SideChannelServer(bind, self._directory.answer, config.secret, insecure=config.insecure)
            self._exports.endpoint = Endpoint(told.host, self._server.endpoint.port)
            _log.info("engine %s is described at %s", transfer.engine_id, self._exports.endpoint)

    # Requests

    def on_new_request(self, request: Request) -> None:
        """Note a request; on a producer, leave the consumer the position whose state or window it needs."""
        params = request.kv_transfer_params
        if not params:
            self._news = True
            self._loads.names_no_producer(request)
            return
        self._loads.arrived(request, self._work())
        if params.get("do_remote_decode") and (self._groups.has_state or self._groups.has_window):
            shorten_prompt(request, self._backoff)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Say how many tokens come from the producer, beside the step loop."""
        if not request.kv_transfer_params:
            return 0, False
        self._news = True
        count = self._loads.available(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Pull into the blocks just reserved, or decline."""
        params = request.kv_transfer_params
        if not params:
            return
        self._loads.allocated(request, blocks, num_external_tokens, self._work())
        if params.get("do_remote_decode"):
            self._exports.prepare(request, self._work())

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer a finished request's blocks to its consumer, if it has one to come."""
        params = request.kv_transfer_params
        if not params:
            return False, None
        offered = self._offer(request, params, block_ids)
        self.partial.forget(request.request_id)
        if offered is None:
            self._exports.discard(request.request_id, self._work())
        return offered is not None, offered

    def _offer(
        self, request: Request, params: Mapping[str, Any], block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        was_load = request.request_id in self._loads
        if not self._loads.finished(request, self._work()):
            return None
        is_prefill = bool(params.get("do_remote_decode"))
        turn_back = not is_prefill and self._options.bidirectional and ("kvrdma" in params or was_load)
        if not is_prefill and not turn_back:
            return None
        return self._exports.export(
            request, block_ids, self._work(), self.partial, turn_back=turn_back, with_blocks=self._with_blocks
        )

    # Steps

    def _work(self) -> StepMetadata:
        """Give what the next step's work is added to."""
        self._news = True
        if self.step is None:
            self.step = StepMetadata()
        return self.step

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Note what has ended on every rank."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, LoadBlame):
            self._loads.blame(meta.request_ids)
        if output.finished_recving:
            self._news = True
            self._loads.ended(output.finished_recving, output.failed_recving or ())
        if output.finished_sending:
            self._exports.ended(output.finished_sending)

    def stats(self) -> KvRdmaStats | None:
        """Give what has changed since the last call."""
        if not self._news and not self._breakers_open:  # asked in every step; an open breaker closes by itself
            return None
        self._news = False
        now, told, breakers_open = _values(self._counts), self._told, self._loads.breakers_open()
        if now == told and breakers_open == self._breakers_open:
            return None
        self._told, self._breakers_open = now, breakers_open
        counts = {name: n - m for name, n, m in zip(_COUNTED, now, told, strict=True) if n != m}
        gauges = {"breakers_open": {"scheduler": breakers_open}}
        return KvRdmaStats({"series": {}, "counts": counts, "failures": {}, "gauges": gauges})

    # Life

    def set_handshake_metadata(self, metadata: Mapping[tuple[int, int], object]) -> None:
        """Describe these ranks from now on; what other connectors send is not for us."""
        ranks = {rank: meta for rank, meta in metadata.items() if isinstance(meta, RankHandshake)}
        if not ranks:
            return
        generation = self._exports.renew_registration()
        self._directory.replace(
            {
                rank: msgspec.structs.replace(meta.description(), rank=rank, generation=generation)
                for rank, meta in ranks.items()
            }
        )

    @property
    def idle(self) -> dict[str, int]:
        """Sizes of everything that is empty when no request is under way."""
        left = {"loads": len(self._loads), "exports": len(self._exports), "partial": len(self.partial)}
        return left | {"step": int(bool(self.step))}

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()


def shorten_prompt(request: Request, tokens: int) -> None:
    """Let a producer stop before the last tokens: the consumer computes them from the state before them.

    Does nothing for prompts that are too short, for a request seen before, or one whose consumer loads nothing.
    """
    params = request.kv_transfer_params
    assert params is not None
    if params.get("_kvrdma_shortened") or request.num_prompt_tokens <= tokens:
        return
    if request.prompt_token_ids is None or request.get_skip_reading_prefix_cache():
        return
    del request.prompt_token_ids[-tokens:]
    del request._all_token_ids[-tokens:]  # noqa: SLF001 - vLLM has no other way to shorten a request
    request.num_prompt_tokens -= tokens
    request.max_tokens = 1
    params["_kvrdma_shortened"] = True
