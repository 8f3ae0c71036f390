"""``KvRdmaConnector``: vLLM's connector interface over the scheduler side and the worker side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvrdma.connector.groups import TransferGroups, transfer_group_ids
from kvrdma.connector.identity import check_supported
from kvrdma.connector.logs import join_logs
from kvrdma.connector.metadata import NO_WORK, StepMetadata
from kvrdma.connector.options import ConnectorOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvrdma.connector.metadata import LoadBlame, RankHandshake
    from kvrdma.connector.metrics import KvRdmaStats
    from kvrdma.connector.prometheus import KvRdmaPromMetrics
    from kvrdma.connector.scheduler import SchedulerSide
    from kvrdma.connector.worker import WorkerSide


class KvRdmaConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV from prefill to decode engines by one-sided reads.

    vLLM makes one in the scheduler's process and one in every worker. Methods of other vLLM versions than the
    installed one are defined too, and extra arguments are ignored.
    """

    _cache_hit_source = CacheHitSource.P2P
    scheduler: SchedulerSide
    """Only in the scheduler's connector."""
    worker: WorkerSide
    """Only in a worker's connector."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig, **_: object
    ) -> None:
        """Check the configuration and start the side that ``role`` asks for.

        Raises:
            KVRDMAError: something is set that cannot work; says what.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        join_logs()
        check_supported(vllm_config)
        transfer = vllm_config.kv_transfer_config
        options = ConnectorOptions.read(transfer.kv_connector_extra_config or {})
        self._group_ids = transfer_group_ids(kv_cache_config)
        self._has_window = TransferGroups(kv_cache_config).has_window
        self._begun: object = None
        self._side: SchedulerSide | WorkerSide
        if role == KVConnectorRole.SCHEDULER:
            from kvrdma.connector.scheduler import SchedulerSide

            self._side = self.scheduler = SchedulerSide(vllm_config, kv_cache_config, options)
        else:
            from kvrdma.connector.ranks import this_rank
            from kvrdma.connector.worker import WorkerSide

            self._side = self.worker = WorkerSide(vllm_config, kv_cache_config, options, this_rank())

    # What the class says of itself

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for head-major pages: every head is one run of bytes."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, *_: object, **__: object) -> bool:
        """Registrations are let go before sleep and made anew after it."""
        return True

    @classmethod
    def only_restores_canonical_kv(cls, *_: object, **__: object) -> bool:
        """KV comes from another engine, which may have computed it otherwise."""
        return False

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A load restores every group's state, but of a window no position that is here in full attention."""
        return not self._has_window

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Learn whose prefix cache blocks are kept out of."""
        self.scheduler.partial.pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        """See ``SchedulerSide``, as for the methods below."""
        self.scheduler.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002 - all of them, always
        """Name the groups that a load fills, so that nobody zeroes their blocks meanwhile."""
        return self._group_ids

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Count tokens to pull."""
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int, **_: object
    ) -> None:
        """Order the pull."""
        self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: object) -> StepMetadata:  # noqa: ARG002 - nothing of it matters
        """Hand work to the workers."""
        side = self.scheduler
        if side.partial:
            side.partial.hide()
        step, side.step = side.step, None
        return step or NO_WORK

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear what has ended."""
        ended = connector_output.finished_recving or connector_output.finished_sending
        if ended or connector_output.kv_connector_worker_meta is not None:  # not so in nearly every step
            self.scheduler.update_connector_output(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...], **_: object
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer a finished request."""
        return self.scheduler.request_finished(request, block_ids)

    def request_finished(
        self, request: Request, block_ids: list[int], **_: object
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer a finished request of an engine with one KV group."""
        return self.scheduler.request_finished(request, (block_ids,))

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, object]) -> None:
        """Learn the ranks of the first pipeline stage."""
        self.scheduler.set_handshake_metadata({(0, rank): meta for rank, meta in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], object]) -> None:
        """Learn the ranks; called again after sleep."""
        self.scheduler.set_handshake_metadata(metadata)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any], **_: object) -> None:
        """Open the engine on this rank's caches."""
        from kvrdma.connector.ranks import pipeline_stages

        self.worker.register(kv_caches, pipeline_stages(self._vllm_config, list(kv_caches)))

    def unregister_kv_caches(self, *_: object, **__: object) -> None:
        """Let the caches' memory go, before sleep."""
        self.worker.unregister()

    def restore_kv_caches(self, *_: object, **__: object) -> None:
        """Register the caches anew, after sleep."""
        self.worker.restore()

    def get_handshake_metadata(self) -> RankHandshake | None:
        """Describe this rank for the scheduler."""
        return self.worker.handshake()

    def bind_connector_metadata(self, connector_metadata: object) -> None:
        """Begin this step's transfers: blocks are reserved, and on a CPU the later hook comes after the forward."""
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata and connector_metadata is not self._begun:
            self._begin()
        else:
            self._begun = connector_metadata

    def start_load_kv(self, *_: object, **__: object) -> None:
        """Begin this step's transfers, if binding has not."""
        if self._connector_metadata is not self._begun:
            self._begin()

    def _begin(self) -> None:
        step = self._begun = self._connector_metadata
        if isinstance(step, StepMetadata):
            self.worker.begin(step)

    def clear_connector_metadata(self) -> None:
        """Forget this step's work."""
        super().clear_connector_metadata()
        self._begun = None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002 - told by the scheduler side
        """Report what has ended on this rank."""
        return self.worker.results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report in the form of older vLLM, where a failed load looks like any other."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def build_connector_worker_meta(self) -> LoadBlame | None:
        """Tell the scheduler which producers failed."""
        return self.worker.blame()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads end before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object, **_: object) -> None:
        """Nothing to save: consumers read the caches."""

    def wait_for_save(self) -> None:
        """Nothing to save."""

    # Both

    def get_kv_connector_stats(self) -> KvRdmaStats | None:
        """Give this side's observations."""
        return self._side.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvRdmaStats:
        """Rebuild observations in another process."""
        from kvrdma.connector.metrics import KvRdmaStats

        return KvRdmaStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvRdmaPromMetrics:
        """Register ``vllm:kvrdma_*``."""
        from kvrdma.connector.prometheus import KvRdmaPromMetrics

        return KvRdmaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Stop. Idempotent."""
        self._side.close()
