"""The peer engines a consumer knows: connecting, connected, or left alone for a while."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeAlias

from kvrdma.breaker import CircuitBreaker
from kvrdma.config import Config
from kvrdma.engine.background import Work
from kvrdma.engine.events import Stats
from kvrdma.engine.links import PeerEngine
from kvrdma.engine.loop import Loop
from kvrdma.errors import ConfigError, ConnectError, IncompatibleError, KVRDMAError, PeerUnavailableError
from kvrdma.reference import PeerKey, PullReference
from kvrdma.transport import PeerId

MAX_HANDSHAKES = 64
"""At the same time."""
_MAX_CONNECTING = 1024
_MAX_BREAKERS = 1024
_PROBE_WINDOW_S = 10.0
_WARN_EVERY_S = 10.0
_log = logging.getLogger(__name__)

Waiter: TypeAlias = Callable[[PeerEngine | KVRDMAError], None]
"""Called in the data thread, once."""


class Sparing:
    """Says yes once per key and period, so that a failure that repeats warns once."""

    def __init__(self, period_s: float, limit: int = 1024) -> None:
        self._period_s = period_s
        self._limit = limit
        self._said: OrderedDict[Hashable, float] = OrderedDict()

    def __call__(self, key: Hashable, now_s: float) -> bool:
        """Whether to say it now."""
        if now_s - self._said.get(key, float("-inf")) < self._period_s:
            return False
        self._said[key] = now_s
        self._said.move_to_end(key)
        if len(self._said) > self._limit:
            self._said.popitem(last=False)
        return True


class Peers:
    """Finds or connects peer engines. Belongs to the data thread; ``connect`` runs in the background.

    One engine's handshake never waits for another's, as long as fewer than ``MAX_HANDSHAKES`` are under way.
    """

    def __init__(
        self,
        config: Config,
        connect: Callable[[PullReference], PeerEngine],
        background: Callable[[Work], None],
        loop: Loop,
        stats: Stats,
    ) -> None:
        """Know nobody yet."""
        self._config = config
        self._connect = connect
        self._background = background
        self._loop = loop
        self._stats = stats
        self._connecting: dict[PeerKey, list[Waiter]] = {}
        self._ready: dict[PeerKey, PeerEngine] = {}
        self._breakers: OrderedDict[PeerKey, CircuitBreaker] = OrderedDict()
        self._warn = Sparing(_WARN_EVERY_S)
        self._closed = False

    @property
    def connecting(self) -> int:
        """Count the handshakes under way."""
        return len(self._connecting)

    def find(self, reference: PullReference, waiter: Waiter) -> None:
        """Hand the connected peer, or why there is none, to ``waiter``: at once if that is known."""
        key = reference.peer
        peer = self._ready.get(key)
        if peer is not None:
            peer.used_s = self._loop.now()
            waiter(peer)
        elif key in self._connecting:
            self._connecting[key].append(waiter)
        elif self._closed:
            waiter(PeerUnavailableError(f"engine {key.engine_id} is not met any more: this engine is closed"))
        elif len(self._connecting) >= _MAX_CONNECTING:
            waiter(
                PeerUnavailableError(
                    f"engine {key.engine_id}: {len(self._connecting)} handshakes are under way, the most at a time: "
                    "are these producers up?"
                )
            )
        elif not self._breaker(key).allow():
            waiter(
                PeerUnavailableError(
                    f"engine {key.engine_id} failed repeatedly and is left alone for at most "
                    f"{self._config.breaker_cooldown_s:g} s (KVRDMA_BREAKER_COOLDOWN_S)"
                )
            )
        else:
            self._start_handshake(key, reference, waiter)

    def _start_handshake(self, key: PeerKey, reference: PullReference, waiter: Waiter) -> None:
        def shake_hands() -> None:
            try:
                result: PeerEngine | KVRDMAError = self._connect(reference)
            except KVRDMAError as error:
                result = error
            except Exception as error:  # noqa: BLE001 - what a strange peer makes us raise must reach its waiters
                _log.exception("handshake with engine %s met a defect", key.engine_id)
                result = ConnectError(f"handshake with engine {key.engine_id} met a defect: {error!r}")
            self._loop.run(lambda: self._deliver(key, result))

        self._stats.handshakes += 1
        self._connecting[key] = [waiter]
        try:
            self._background(shake_hands)
        except ConfigError as error:
            self._deliver(key, error)

    def _deliver(self, key: PeerKey, result: PeerEngine | KVRDMAError) -> None:
        waiters = self._connecting.pop(key, [])
        if isinstance(result, PeerEngine):
            if self._closed:
                result.disconnect()
                return
            for old in [one for one in self._ready if _succeeds(key, one)]:
                _log.info("engine %s was restarted: the connection to its predecessor is dropped", key.engine_id)
                self.drop(self._ready[old], blame=False)
            result.used_s = self._loop.now()
            self._ready[key] = result
            _log.info("engine %s connected: %s", key.engine_id, " | ".join(result.why))
        else:
            self._stats.handshakes_failed += 1
            if not isinstance(result, IncompatibleError | ConfigError):  # the latter is this side's doing
                self._breaker(key).record_failure()
            if self._warn(key, self._loop.now()):
                _log.warning("handshake with engine %s failed: %s", key.engine_id, result)
        for waiter in waiters:
            waiter(result)

    def _breaker(self, key: PeerKey) -> CircuitBreaker:
        """Give the circuit breaker of one start of an engine: a restarted one is not blamed for its predecessor."""
        found = self._breakers.get(key)
        if found is None:
            config = self._config
            found = CircuitBreaker(
                key.engine_id, config.breaker_cooldown_s, config.breaker_threshold, _PROBE_WINDOW_S, self._loop.now
            )
            self._breakers[key] = found
            if len(self._breakers) > _MAX_BREAKERS:
                self._breakers.popitem(last=False)
        self._breakers.move_to_end(key)
        return found

    def succeeded(self, reference: PullReference) -> None:
        """Note that a pull from a peer has succeeded."""
        self._breaker(reference.peer).record_success()

    def drop(self, peer: PeerEngine, *, blame: bool) -> None:
        """Disconnect a peer; the next pull from it starts with a new handshake. Idempotent.

        A connection is blamed once, however many pulls were on it.
        """
        if self._ready.get(peer.key) is peer:
            del self._ready[peer.key]
            if blame:
                self._breaker(peer.key).record_failure()
            peer.disconnect()

    def lose(self, transport: str, peer_id: PeerId) -> None:
        """Drop the engine to which a lost transport peer belongs."""
        for peer in self.ready():
            if any(link.peer.id == peer_id and link.transport.name == transport for link in peer.links):
                self._stats.peers_lost += 1
                self.drop(peer, blame=False)

    def drop_idle(self, unused_for_s: float, in_use: Callable[[PeerEngine], bool]) -> None:
        """Drop peers that nothing has used for a while."""
        now_s = self._loop.now()
        for peer in self.ready():
            if now_s - peer.used_s > unused_for_s and not in_use(peer):
                self.drop(peer, blame=False)

    def known(self, reference: PullReference) -> PeerEngine | None:
        """Give the connected peer of a reference, if there is one."""
        return self._ready.get(reference.peer)

    def once_known(self, reference: PullReference, then: Callable[[PeerEngine], None]) -> None:
        """Do something with a peer that is connected, or once a handshake under way succeeds; starts none."""

        def found(peer: PeerEngine | KVRDMAError) -> None:
            if isinstance(peer, PeerEngine):
                then(peer)

        key = reference.peer
        if key in self._ready:
            then(self._ready[key])
        elif key in self._connecting:
            self._connecting[key].append(found)

    def ready(self) -> list[PeerEngine]:
        """List the connected peers."""
        return list(self._ready.values())

    def close(self) -> None:
        """Drop every peer."""
        self._closed = True
        self._connecting.clear()
        for peer in self.ready():
            self.drop(peer, blame=False)


def _succeeds(key: PeerKey, other: PeerKey) -> bool:
    """Whether both are starts of one engine, and different ones."""
    return key.engine_id == other.engine_id and key.generation != other.generation
