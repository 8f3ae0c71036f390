"""Scheduler side of the producer: leases for finished requests, and what their consumers are told."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvrdma.connector.groups import TransferGroups
from kvrdma.connector.metadata import Publication, StepMetadata
from kvrdma.connector.metrics import Counts
from kvrdma.connector.partial import PartialBlocks
from kvrdma.connector.prompt import prompt_digest
from kvrdma.errors import LeaseError
from kvrdma.lease import FenceTable, LeaseKey
from kvrdma.reference import PullReference, id_text
from kvrdma.sidechannel import Endpoint
from kvrdma.topology import EngineShape

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvrdma.connector.options import ConnectorOptions

_EXPORTED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
_log = logging.getLogger(__name__)


class Exports:
    """Opens one lease per finished request, the same on every rank, and closes it when all ranks are done."""

    def __init__(
        self,
        engine_id: str,
        shape: EngineShape,
        pp_size: int,
        groups: TransferGroups,
        options: ConnectorOptions,
        counts: Counts,
    ) -> None:
        self.generation = 0
        """Of the registration that the references belong to; grows with every one."""
        self.endpoint: Endpoint | None = None
        self._engine_id = engine_id
        self._shape = shape
        self._pp_size = pp_size
        self._groups = groups
        self._options = options
        self._counts = counts
        self._slots = FenceTable(options.config.fence_slots)
        self._leases: dict[str, LeaseKey] = {}
        self._prepared: dict[str, LeaseKey] = {}

    def __len__(self) -> int:
        return len(self._leases) + len(self._prepared)

    def renew_registration(self) -> int:
        """Begin a new generation: references to what was registered before are refused."""
        for lease in self._prepared.values():
            self._slots.release(lease)
        self._prepared.clear()  # the ranks have forgotten them
        self.generation = max(self.generation + 1, time.time_ns() // 1000)
        return self.generation

    def prepare(self, request: Request, step: StepMetadata) -> None:
        """Have every rank ready before the request can end: its consumer then finds the lease live at once.

        Called in a step that computes some of the prompt; its tokens come back after every rank has begun that step.
        """
        if self.endpoint is None or request.request_id in self._prepared:
            return
        with suppress(LeaseError):  # all are taken: then, or a publication at the end is late by one step
            self._prepared[request.request_id] = self._slots.allocate()
            step.prepare.append(self._prepared[request.request_id])

    def discard(self, request_id: str, step: StepMetadata) -> None:
        """Take back what was prepared for a request that has ended otherwise."""
        lease = self._prepared.pop(request_id, None)
        if lease is not None:
            step.discard.append(lease)
            self._slots.release(lease)

    def export(
        self,
        request: Request,
        block_ids: Sequence[Sequence[int]],
        step: StepMetadata,
        partial: PartialBlocks,
        *,
        turn_back: bool = False,
        with_blocks: bool = False,
    ) -> dict[str, Any] | None:
        """Offer a finished request; None where there is nothing to offer and its blocks are free.

        Args:
            request: finished.
            block_ids: its blocks, for every KV group.
            step: where the workers are told.
            partial: of which blocks it was loaded itself, without their beginning.
            turn_back: it was decoded here, and the next turn's prefill may want it.
            with_blocks: whether the workers need the block ids.
        """
        if self.endpoint is None or request.status not in _EXPORTED or not any(block_ids):
            return None
        num_tokens = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        # A prefill may have computed tokens of its own answer; its consumer wants the prompt.
        num_tokens = min(num_tokens, request.num_tokens if turn_back else request.num_prompt_tokens)
        prepared = self._prepared.pop(request.request_id, None)
        try:
            lease = prepared or self._slots.allocate()
        except LeaseError as error:
            self._counts.requests_not_offered += 1
            _log.warning("request %s is not offered: %s", request.request_id, error)
            return None
        self._leases[request.request_id] = lease
        lease_s = self._options.decoder_lease_s if turn_back else self._options.config.lease_s
        blocks, first_blocks = self._groups.to_publish(block_ids)
        told, firsts = (blocks, tuple(first_blocks)) if with_blocks else ((), ())
        kept_s = lease_s if turn_back else None
        step.publish.append(Publication(request.request_id, lease, num_tokens, told, kept_s, firsts))
        params = self._reference(request.request_id, lease, num_tokens, lease_s)
        params |= {
            "remote_block_ids": [list(group) for group in blocks],
            "do_remote_prefill": not turn_back,
            "do_remote_decode": turn_back,
        }
        params["kvrdma"] |= {
            "first_blocks": list(first_blocks),
            "first_tokens": list(partial.first_tokens(request.request_id, self._groups.first_tokens(first_blocks))),
            "prompt": prompt_digest(request, num_tokens),
            "live": prepared is not None and not with_blocks,  # staged ones are not there yet
        }
        return params

    def _reference(self, request_id: str, lease: LeaseKey, num_tokens: int, lease_s: float) -> dict[str, Any]:
        assert self.endpoint is not None
        return PullReference(
            engine_id=self._engine_id,
            engine_generation=self.generation,
            host=self.endpoint.host,
            port=self.endpoint.port,
            lease=lease,
            num_tokens=num_tokens,
            blocks=(),
            first_blocks=(),
            request_id=id_text(request_id),
            lease_s=lease_s,
            tp_size=self._shape.tp_size,
            dcp_size=self._shape.dcp_size,
            pp_size=self._pp_size,
            interleave=self._shape.interleave,
        ).to_params()

    def ended(self, request_ids: Collection[str]) -> None:
        """Take back the leases that have ended on every rank."""
        for request_id in request_ids:
            lease = self._leases.pop(request_id, None)
            if lease is not None:
                self._slots.release(lease)
