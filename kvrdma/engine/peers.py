"""The peer engines a consumer knows: connecting, connected, or left alone for a while."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from kvrdma.breaker import CircuitBreaker
from kvrdma.engine.events import Stats
from kvrdma.engine.links import Home, PeerEngine, connect_engine
from kvrdma.errors import IncompatibleError, KVRDMAError, PeerUnavailableError
from kvrdma.reference import PullReference
from kvrdma.transport import PeerId

_MAX_BREAKERS = 1024
_PROBE_WINDOW_S = 10.0
_log = logging.getLogger(__name__)

Waiter: TypeAlias = Callable[[PeerEngine | KVRDMAError], None]
"""Called in the data thread, once."""


class PeerKey(NamedTuple):
    """One start of one engine."""

    engine_id: str
    generation: int


@dataclass(slots=True)
class _Connecting:
    thread: threading.Thread
    waiters: list[Waiter] = field(default_factory=list)


class Peers:
    """Finds or connects peer engines. Belongs to the data thread; handshakes run in threads of their own.

    One engine's handshake never waits for another's. Results come back through ``deliver``, which the data thread
    runs.
    """

    def __init__(
        self,
        home: Home,
        stats: Stats,
        run_in_data_thread: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._home = home
        self._stats = stats
        self._run = run_in_data_thread
        self._clock = clock
        self._connecting: dict[PeerKey, _Connecting] = {}
        self._ready: dict[PeerKey, PeerEngine] = {}
        self._breakers: OrderedDict[PeerKey, CircuitBreaker] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        return len(self._ready) + len(self._connecting)

    def find(self, reference: PullReference, waiter: Waiter) -> None:
        """Hand the connected peer, or why there is none, to ``waiter``: at once if that is known."""
        key = PeerKey(reference.engine_id, reference.engine_generation)
        peer = self._ready.get(key)
        if peer is not None:
            peer.used_s = self._clock()
            waiter(peer)
        elif key in self._connecting:
            self._connecting[key].waiters.append(waiter)
        elif not self.breaker(reference).allow():
            waiter(PeerUnavailableError(f"engine {key.engine_id} failed repeatedly and is left alone for a while"))
        else:
            self._connect(key, reference, waiter)

    def _connect(self, key: PeerKey, reference: PullReference, waiter: Waiter) -> None:
        def shake_hands() -> None:
            try:
                result: PeerEngine | KVRDMAError = connect_engine(self._home, reference)
            except KVRDMAError as error:
                result = error
            self._run(lambda: self._deliver(reference, result))

        self._stats.handshakes += 1
        thread = threading.Thread(target=shake_hands, name=f"kvrdma handshake {key.engine_id}", daemon=True)
        self._connecting[key] = _Connecting(thread, [waiter])
        thread.start()

    def _deliver(self, reference: PullReference, result: PeerEngine | KVRDMAError) -> None:
        key = PeerKey(reference.engine_id, reference.engine_generation)
        waiters = self._connecting.pop(key).waiters
        if isinstance(result, PeerEngine):
            if self._closed:
                result.disconnect()
                return
            for old in [other for other in self._ready if other.engine_id == key.engine_id]:
                self.drop(self._ready[old])
            result.used_s = self._clock()
            self._ready[key] = result
            _log.info("engine %s connected: %s", key.engine_id, " | ".join(result.why))
        else:
            self._stats.handshakes_failed += 1
            if not isinstance(result, IncompatibleError):
                self.breaker(reference).record_failure()
            _log.warning("handshake with engine %s failed: %s", key.engine_id, result)
        for waiter in waiters:
            waiter(result)

    def breaker(self, reference: PullReference) -> CircuitBreaker:
        """Give the circuit breaker of one start of an engine: a restarted one is not blamed for its predecessor."""
        key = PeerKey(reference.engine_id, reference.engine_generation)
        found = self._breakers.get(key)
        if found is None:
            config = self._home.config
            found = CircuitBreaker(
                key.engine_id, config.breaker_cooldown_s, config.breaker_threshold, _PROBE_WINDOW_S, self._clock
            )
            self._breakers[key] = found
            if len(self._breakers) > _MAX_BREAKERS:
                self._breakers.popitem(last=False)
        self._breakers.move_to_end(key)
        return found

    def drop(self, peer: PeerEngine) -> None:
        """Disconnect a peer; the next pull from it starts with a new handshake. Idempotent."""
        key = PeerKey(peer.engine_id, peer.generation)
        if self._ready.get(key) is peer:
            del self._ready[key]
            peer.disconnect()

    def lose(self, transport: str, peer_id: PeerId) -> None:
        """Drop the engine to which a lost transport peer belongs."""
        for peer in list(self._ready.values()):
            if any(link.peer.id == peer_id and link.peer.transport == transport for link in peer.links):
                self._stats.peers_lost += 1
                self.drop(peer)

    def drop_idle(self, unused_for_s: float, in_use: Callable[[PeerEngine], bool]) -> None:
        """Drop peers that nothing has used for a while."""
        now_s = self._clock()
        for peer in list(self._ready.values()):
            if now_s - peer.used_s > unused_for_s and not in_use(peer):
                self.drop(peer)

    def known(self, reference: PullReference) -> PeerEngine | None:
        """Give the connected peer of a reference, if there is one."""
        return self._ready.get(PeerKey(reference.engine_id, reference.engine_generation))

    def ready(self) -> list[PeerEngine]:
        """List the connected peers."""
        return list(self._ready.values())

    def close(self) -> list[threading.Thread]:
        """Drop every peer; returns the threads of handshakes that still run."""
        self._closed = True
        for peer in self.ready():
            self.drop(peer)
        return [connecting.thread for connecting in self._connecting.values()]
