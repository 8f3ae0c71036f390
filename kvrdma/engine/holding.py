"""Leases that are kept alive for requests that are not pulled yet."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from kvrdma.engine.links import PeerEngine
from kvrdma.engine.loop import Loop, Timer
from kvrdma.engine.peers import Peers
from kvrdma.engine.tenant import Tenant
from kvrdma.errors import KVRDMAError
from kvrdma.lease import LeaseKey
from kvrdma.reference import PullReference

_TRIES_PER_LEASE = 3
_SHORTEST_S = 0.1
"""References come from clients, and may name leases of no length."""


@dataclass(slots=True, eq=False)
class _Held:
    reference: PullReference
    until: Timer
    next_try: Timer | None = None


class Holding:
    """Connects to the producers of held requests, again and again if need be. Belongs to the data thread."""

    def __init__(self, loop: Loop, peers: Peers, tenant: Tenant) -> None:
        """Hold nothing yet."""
        self._loop = loop
        self._peers = peers
        self._tenant = tenant
        self._held: dict[Hashable, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: Hashable, reference: PullReference, for_s: float) -> None:
        """Keep a lease alive until it is released, at most for ``for_s`` seconds."""
        self.release(request_id)
        held = _Held(reference, self._loop.after(for_s, lambda: self.release(request_id)))
        self._held[request_id] = held
        self._connect(request_id, held)

    def _connect(self, request_id: Hashable, held: _Held) -> None:
        def found(peer: PeerEngine | KVRDMAError) -> None:
            if self._held.get(request_id) is not held:
                return
            if isinstance(peer, PeerEngine):
                self._tenant.keep(held, held.reference, peer.tell)
            else:
                again_s = max(_SHORTEST_S, held.reference.lease_s / _TRIES_PER_LEASE)
                held.next_try = self._loop.after(again_s, lambda: self._connect(request_id, held))

        self._peers.find(held.reference, found)

    def release(self, request_id: Hashable) -> None:
        """Let go of a request's lease; unknown ones are ignored."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._tenant.leave(held)
            held.until.cancel()
            if held.next_try is not None:
                held.next_try.cancel()

    def release_lease(self, lease: LeaseKey) -> None:
        """Let go of a lease under whatever request id."""
        for request_id in [key for key, held in self._held.items() if held.reference.lease == lease]:
            self.release(request_id)

    def close(self) -> None:
        """Let go of everything."""
        for request_id in list(self._held):
            self.release(request_id)
