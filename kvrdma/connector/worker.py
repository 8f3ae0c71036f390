"""The connector in a worker's process: one engine on the rank's caches, and who is told what has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvrdma.connector.identity import rank_identity, stages_in_host_memory
from kvrdma.connector.layouts import Caches, exchanged_caches
from kvrdma.connector.metadata import Load, LoadBlame, Publication, RankHandshake, StepMetadata
from kvrdma.connector.metrics import GAUGES, KvRdmaStats
from kvrdma.connector.staging import HostStaging
from kvrdma.engine import Ended, Engine, Event, PullDone, PullFailed
from kvrdma.errors import (
    ConfigError,
    ControlError,
    IncompatibleError,
    KVRDMAError,
    PeerUnavailableError,
    PullAbortedError,
    PullTimeoutError,
    ReadCancelledError,
    TransportError,
)
from kvrdma.lease import LeaseKey
from kvrdma.plan import BlockSpan
from kvrdma.topology import RankId

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvrdma.connector.options import ConnectorOptions

_PEERS_FAULT = (TransportError, ControlError, PullTimeoutError, PeerUnavailableError)
_COUNTED = ("fence_rejections", "pulls_retried", "publications_expired", "publications_done")
_LOOK_AGAIN_S = 1.0
_log = logging.getLogger(__name__)


class WorkerSide:
    """One per rank. Called from the worker's main thread only, and never waits."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: ConnectorOptions, rank: RankId
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = replace(options.config, bind=options.worker_bind())
        self._rank = rank
        self._engine: Engine | None = None
        self._caches: Caches | None = None
        self._staging: HostStaging | None = None
        self._stages: tuple[tuple[str, ...], ...] = ()
        self._loading: dict[str, Load] = {}
        self._held_back: dict[str, KVRDMAError] = {}
        self._publishing: set[str] = set()
        self._results = KVConnectorTransferResults()
        self._blamed: set[str] = set()
        self._stats = KvRdmaStats()
        self._told = dict.fromkeys((*_COUNTED, *GAUGES), 0)
        self._news = False
        """Something has begun or ended since the engine was asked for its counts."""
        self._look_again_s = 0.0

    @property
    def engine(self) -> Engine:
        """The engine on the registered caches."""
        if self._engine is None:
            raise ConfigError("no caches are registered: call register_kv_caches first, after sleep restore_kv_caches")
        return self._engine

    # Caches

    def register(self, kv_caches: Mapping[str, Any], stages: tuple[tuple[str, ...], ...]) -> None:
        """Open the engine on the caches.

        Args:
            kv_caches: layer name to tensor.
            stages: layers of each pipeline stage, empty for a single one.

        Raises:
            KVRDMAError: a layout, setting or transport cannot be used; says why.
        """
        identity = rank_identity(self._vllm_config, self._rank, stages)
        self._stages = stages
        self._caches = exchanged_caches(
            self._vllm_config, self._kv_cache_config, kv_caches, identity.shape, self._rank.rank
        )
        if stages_in_host_memory(self._vllm_config):
            self._staging = HostStaging(self._caches, self._kv_cache_config.num_blocks)
        self._open()

    def _open(self) -> None:
        assert self._caches is not None
        identity = rank_identity(self._vllm_config, self._rank, self._stages)
        tensors = self._staging.tensors if self._staging is not None else self._caches.tensors
        self._engine = Engine(tensors, self._caches.specs, identity, self._config)
        _log.info("%s", self._engine.describe())

    def unregister(self) -> None:
        """Let go of the caches' memory; what is under way fails, and is reported. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._take(self._engine.poll())
            self._engine = None
        self._results.finished_sending |= self._publishing
        self._publishing.clear()
        for request_id in self._loading:
            self._results.finished_recving.add(request_id)
            self._results.failed_recving.add(request_id)
        self._loading.clear()

    def restore(self) -> None:
        """Open a new engine on the same caches, after ``unregister``."""
        if self._engine is None:
            self._open()

    def handshake(self) -> RankHandshake:
        """Describe this rank for the scheduler, which answers consumers."""
        return RankHandshake.of(self.engine.description())

    # Steps

    def begin(self, step: StepMetadata) -> None:
        """Start what the scheduler has decided; nothing here waits."""
        if not step:
            return
        self._news |= bool(step.publish)
        for lease in step.discard if self._engine is not None else ():
            self.engine.discard(lease)
        for lease in step.prepare:
            self._prepare(lease)
        for publication in step.publish:
            self._publish(publication)
        for request_id, reference in step.hold:
            self.engine.hold(request_id, reference)
        for load in step.load:
            self._load(load)
        for reference in step.decline:
            self.engine.decline(reference)
        for request_id in step.abort:
            if request_id in self._loading:
                self.engine.abort(request_id)

    def _prepare(self, lease: LeaseKey) -> None:
        try:
            self.engine.prepare(lease)
        except KVRDMAError as error:
            _log.warning("lease %s cannot be prepared: %s", tuple(lease), error)

    def _publish(self, publication: Publication) -> None:
        try:
            if self._staging is not None:
                self._staging.to_host(publication.blocks)
            self.engine.publish(
                publication.request_id,
                publication.blocks,
                publication.num_tokens,
                lease=publication.lease,
                first_blocks=publication.first_blocks,
            )
        except KVRDMAError as error:
            _log.warning("request %s cannot be published: %s", publication.request_id, error)
            self.engine.discard(publication.lease)
            self._results.finished_sending.add(publication.request_id)
            return
        self._publishing.add(publication.request_id)
        if publication.lease_s is not None:
            self.engine.extend(publication.request_id, publication.lease_s)

    def _load(self, load: Load) -> None:
        self._loading[load.request_id] = load
        spans = [BlockSpan(group.ids, group.first) for group in load.groups]
        try:
            self.engine.pull(load.request_id, load.reference, spans, tokens=[group.tokens for group in load.groups])
        except KVRDMAError as error:
            self._load_failed(load.request_id, error)

    def results(self) -> KVConnectorTransferResults:
        """Say what has ended since the last call: each request once, whatever happens."""
        if self._engine is not None and self._engine.ended:
            self._take(self._engine.poll())
        results, self._results = self._results, KVConnectorTransferResults()
        return results

    def _take(self, events: list[Event]) -> None:
        for event in events:
            self._news = True
            request_id = str(event.request_id)
            if isinstance(event, Ended):
                if request_id in self._publishing:
                    self._publishing.remove(request_id)
                    self._results.finished_sending.add(request_id)
            elif isinstance(event, PullDone):
                self._stats.pulled(event.elapsed_s, event.read_s, event.nbytes, event.rows_posted)
                self._loaded(request_id)
            elif isinstance(event, PullFailed) and event.quarantined:
                self._held_back[request_id] = event.reason  # its blocks may still be written to
            elif isinstance(event, PullFailed):
                self._load_failed(request_id, event.reason)
            elif request_id in self._held_back:
                self._load_failed(request_id, self._held_back.pop(request_id))

    def _loaded(self, request_id: str) -> None:
        load = self._loading.pop(request_id, None)
        if load is None:
            return
        if self._staging is not None:
            self._staging.to_device([group.ids for group in load.groups])
        self._results.finished_recving.add(request_id)

    def _load_failed(self, request_id: str, reason: KVRDMAError) -> None:
        load = self._loading.pop(request_id, None)
        if load is None:
            return
        peer = load.reference.engine_id
        if isinstance(reason, PullAbortedError) and self._engine is not None:
            self._engine.decline(load.reference)  # aborted in the handshake, nobody has been told yet
        _log.warning("request %s could not be loaded from engine %s: %s", request_id, peer, reason)
        self._news = True
        self._stats.failed(peer, type(reason).__name__)
        if isinstance(reason, _PEERS_FAULT) and not isinstance(reason, ReadCancelledError | IncompatibleError):
            self._blamed.add(request_id)
        self._results.finished_recving.add(request_id)
        self._results.failed_recving.add(request_id)

    def blame(self) -> LoadBlame | None:
        """Name the requests that failed through their producer's fault, each once."""
        if not self._blamed:
            return None
        blamed, self._blamed = self._blamed, set()
        return LoadBlame(frozenset(blamed))

    def stats(self) -> KvRdmaStats | None:
        """Give what has been observed since the last call; None if nothing has."""
        now_s = time.monotonic()
        if not self._news and now_s < self._look_again_s:
            return None
        self._news, self._look_again_s = False, now_s + _LOOK_AGAIN_S
        if self._engine is not None:
            now = self._engine.stats()
            for name in _COUNTED:
                self._stats.count(name, now[name] - self._told[name])
            for name in GAUGES:
                if now[name] != self._told[name]:
                    self._stats.gauge(name, f"{self._rank.pp_rank}/{self._rank.rank}", now[name])
            self._told = {name: now[name] for name in self._told}
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KvRdmaStats()
        return stats

    @property
    def idle(self) -> dict[str, int]:
        """Sizes of everything that is empty when no transfer is under way."""
        return {"loading": len(self._loading), "publishing": len(self._publishing), "held back": len(self._held_back)}

    def close(self) -> None:
        """Revoke every lease and stop. Idempotent."""
        if self._engine is not None:
            self._engine.close()
