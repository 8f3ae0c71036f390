"""The consumer's duties towards producers: heartbeats while it needs a lease, done messages, a goodbye."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

import msgspec

from kvrdma import handshake
from kvrdma.engine.links import PeerEngine, Reader
from kvrdma.handshake import Identity
from kvrdma.reference import PullReference
from kvrdma.sidechannel import Endpoint
from kvrdma.wire import Goodbye, Heartbeat, LeaseDone, Message

_BEATS_PER_LEASE = 3
_BEAT_TRIES_S = 5.0
_GOODBYE_TRIES_S = 1.0
_DONE_TRIES_S = 1.0
"""At least, however short a lease a reference names."""
_SHORTEST_BEAT_S = 0.02
_LEASES_PER_MESSAGE = 4096


class Post(Protocol):
    """Delivers messages without waiting, as ``kvrdma.mailbox.Outbox``."""

    def send(self, endpoint: Endpoint, message: Message, keep_trying_s: float) -> None:
        """Deliver ``message`` at least once, if that is possible within ``keep_trying_s`` seconds."""
        ...


class _Needed(msgspec.Struct):
    lease: tuple[int, int]
    tell: tuple[Reader, ...]
    period_s: float
    due_s: float


class Tenant:
    """Keeps the leases alive that this rank needs. Any thread may call it; ``beat`` belongs to the clock thread."""

    def __init__(self, post: Post, identity: Identity, clock: Callable[[], float]) -> None:
        """Speak for ``identity``."""
        self._post = post
        self._engine_id = identity.engine_id
        self._rank = handshake.flat_rank(identity.shape, identity.rank)
        self._clock = clock
        self._needed: dict[Hashable, _Needed] = {}

    def __len__(self) -> int:
        return len(self._needed)

    def keep(self, owner: Hashable, reference: PullReference, tell: tuple[Reader, ...]) -> None:
        """Renew a lease from now on, until ``leave``."""
        period_s = max(_SHORTEST_BEAT_S, reference.lease_s / _BEATS_PER_LEASE)
        self._needed[owner] = _Needed(_lease(reference), tell, period_s, self._clock())

    def leave(self, owner: Hashable) -> None:
        """Renew it no longer. Idempotent."""
        self._needed.pop(owner, None)

    def beat(self) -> float:
        """Send the heartbeats that are due; returns the seconds until the next are."""
        due: dict[Endpoint, list[tuple[int, int]]] = {}
        now_s = self._clock()
        next_s = float("inf")
        for needed in list(self._needed.values()):  # at once: others add and remove meanwhile
            if needed.due_s <= now_s:
                needed.due_s = now_s + needed.period_s
                for reader in needed.tell:
                    due.setdefault(reader.mailbox, []).append(needed.lease)
            next_s = min(next_s, needed.due_s)
        for mailbox, leases in due.items():
            for start in range(0, len(leases), _LEASES_PER_MESSAGE):
                message = Heartbeat(tuple(leases[start : start + _LEASES_PER_MESSAGE]))
                self._post.send(mailbox, message, _BEAT_TRIES_S)
        return next_s - now_s

    def tell_done(self, peer: PeerEngine, reference: PullReference, *, succeeded: bool) -> None:
        """Tell every rank that waits for this one that it needs the lease no longer."""
        for reader in peer.tell:
            message = LeaseDone(_lease(reference), self._engine_id, self._rank, reader.readers, succeeded)
            self._post.send(reader.mailbox, message, max(_DONE_TRIES_S, reference.lease_s))

    def say_goodbye(self, peers: Iterable[PeerEngine]) -> None:
        """Tell all peers that this rank closes."""
        for mailbox in {reader.mailbox for peer in peers for reader in peer.tell}:
            self._post.send(mailbox, Goodbye(self._engine_id, self._rank), _GOODBYE_TRIES_S)


def _lease(reference: PullReference) -> tuple[int, int]:
    return reference.lease.slot, reference.lease.generation
