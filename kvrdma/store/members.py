"""``Members``: the engines of one family in a store, one per rank, over the store's memory."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvrdma.config import Config
from kvrdma.engine import Engine
from kvrdma.errors import KVRDMAError
from kvrdma.handshake import Identity
from kvrdma.lease import LeaseKey
from kvrdma.plan import BlockSpan, TokenRange
from kvrdma.reference import PullReference
from kvrdma.sidechannel import Endpoint
from kvrdma.store.geometry import Family, views
from kvrdma.topology import RankId

_CLOSE_S = 15.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fill:
    """What one rank reads from a sender: blocks from ``first`` of the prompt on, into ``records``."""

    rank: int
    first: int
    records: Sequence[int]
    num_tokens: int
    """Of the prompt up to the end of the last of them."""


class Members:
    """Pulls blocks from senders, and publishes them for readers, on every rank of a family at once."""

    def __init__(self, family: Family, arena: np.ndarray[Any, np.dtype[np.uint8]], config: Config) -> None:
        """Open the engines. Takes some tens of milliseconds.

        Raises:
            KVRDMAError: the memory cannot be registered, or nothing can listen.
        """
        self.family = family
        self._engines: list[Engine] = []
        # Where it listens is the store's own affair: any port of the same host.
        host = Endpoint.parse(config.bind).host
        own = replace(config, bind=str(Endpoint(host, 0)))
        name = f"store-{secrets.token_hex(8)}"
        leader: Endpoint | None = None
        try:
            for rank in range(family.ranks):
                arrays, specs = views(arena, family, rank)
                identity = Identity(name, family.shape, RankId(0, rank), model=family.model)
                engine = Engine(arrays, specs, identity, own, leader=leader)
                self._engines.append(engine)
                leader = leader or engine.endpoint
        except KVRDMAError:
            self.close()
            raise

    @property
    def engines(self) -> Sequence[Engine]:
        """The engines, by rank."""
        return self._engines

    def fill(self, name: Hashable, reference: PullReference, fill: Fill, timeout_s: float) -> None:
        """Start to read a sender's blocks; the rank's engine reports the end under ``name``.

        Raises:
            KVRDMAError: the reference does not hold what was offered.
        """
        start = fill.first * self.family.block_tokens
        self._engines[fill.rank].pull(
            name,
            reference,
            [BlockSpan(list(fill.records), fill.first)],
            tokens=TokenRange(start, fill.num_tokens),
            timeout_s=timeout_s,
        )

    def decline(self, rank: int, reference: PullReference) -> None:
        """Tell a sender that nothing of its blocks is needed."""
        self._engines[rank].decline(reference)

    def publish(self, name: Hashable, records: Sequence[int], num_tokens: int) -> PullReference:
        """Let one reader read records on every rank.

        Raises:
            LeaseError: every lease is taken.
        """
        lease: LeaseKey | None = None
        published: PullReference | None = None
        done: list[Engine] = []
        try:
            for engine in self._engines:
                reference = engine.publish(name, records, num_tokens, lease=lease)
                done.append(engine)
                lease, published = reference.lease, published or reference
        except KVRDMAError:
            for engine in done:
                engine.withdraw(name)
            raise
        assert published is not None
        return published

    def withdraw(self, name: Hashable) -> None:
        """End a publication on every rank."""
        for engine in self._engines:
            engine.withdraw(name)

    def close(self) -> None:
        """Close the engines, all at once: each may wait a second for messages to peers that are gone."""
        closing = [threading.Thread(target=_close, args=(engine,), daemon=True) for engine in self._engines]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(_CLOSE_S)


def _close(engine: Engine) -> None:
    try:
        engine.close()
    except Exception:  # noqa: BLE001 - it has ended by a defect; the others must still be closed
        _log.exception("an engine of the store ended by a defect")
