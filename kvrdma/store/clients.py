"""``Stores``: the stores an engine uses, and which of them holds what.

Which store has a prompt is settled by rendezvous hashing of its first block, so that everybody agrees without asking,
prompts that share a beginning share a store, and losing a store moves that store's prompts only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from kvrdma.breaker import CircuitBreaker
from kvrdma.config import Config
from kvrdma.engine.links import allowed
from kvrdma.errors import ConfigError, KVRDMAError, MessageError, UnreachableError
from kvrdma.sidechannel import Endpoint, SideChannelClient
from kvrdma.store.keys import new_hasher
from kvrdma.wire import Message

_PROBE_WINDOW_S = 5.0
_MAX_STORES = 1024
_MAX_ASK_S = 86400.0
_REFUSED_S = 0.25
"""How long a store that nobody listens for is asked: a miss costs less than waiting for it to be started."""
_log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class StoreClient:
    """One store, asked over a connection that is kept. For one thread."""

    def __init__(self, endpoint: Endpoint, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        """Know it; nothing is sent before ``ask``."""
        self.endpoint = endpoint
        self.name = str(endpoint)
        self._config = config
        self._client: SideChannelClient | None = None
        self._breaker = CircuitBreaker(
            f"store {endpoint}", config.breaker_cooldown_s, config.breaker_threshold, _PROBE_WINDOW_S, clock
        )
        self.failures = 0
        """Questions without an answer."""

    @property
    def is_open(self) -> bool:
        """Whether it failed repeatedly and is left alone now."""
        return self._breaker.is_open

    def ask(self, message: Message, kind: type[M], timeout_s: float) -> M | None:
        """Ask, and wait for the answer for at most ``timeout_s`` seconds.

        Returns:
            The answer, or None where the store is dead, slow, frozen or left alone: reasons go to the log.
        """
        if timeout_s <= 0 or not self._breaker.allow():
            return None
        try:
            reply = self._connection().request(message, min(timeout_s, _MAX_ASK_S))
            if not isinstance(reply, kind):
                raise MessageError(f"{self.name} answered {type(reply).__name__}, not {kind.__name__}")
        except KVRDMAError as error:
            self.failures += 1
            _log.info("store %s gave no answer: %s", self.name, error)
            if isinstance(error, UnreachableError | MessageError):
                self._breaker.record_failure()
            elif self.failures == 1:
                _log.warning("store %s refuses: %s", self.name, error)
            return None
        self._breaker.record_success()
        return reply

    def _connection(self) -> SideChannelClient:
        if self._client is None:
            allowed(self.endpoint, self._config.allow_peers)
            self._client = SideChannelClient(self.endpoint, self._config.secret, refused_s=_REFUSED_S)
        return self._client

    def close(self) -> None:
        """Drop the connection. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None


class Stores:
    """Several stores behind one front. For one thread."""

    def __init__(self, endpoints: Sequence[str], config: Config | None = None, *, replicas: int = 1) -> None:
        """Know them.

        Args:
            endpoints: ``HOST:PORT`` each, spelled alike by everybody: the spelling decides what lies where.
            config: settings; ``Config.from_env()`` by default.
            replicas: in how many stores each prompt is kept and looked for.

        Raises:
            ConfigError: none, too many, one twice or malformed, or ``replicas`` is no number of them.
        """
        known = [Endpoint.parse(text) for text in endpoints]
        if not 1 <= len(set(known)) == len(known) <= _MAX_STORES:
            raise ConfigError(f"need 1 to {_MAX_STORES} stores, each once, got {', '.join(map(str, known)) or 'none'}")
        if not 1 <= replicas <= len(known):
            raise ConfigError(f"replicas={replicas} with {len(known)} stores: use 1 to {len(known)}")
        self.config = config or Config.from_env()
        self.replicas = replicas
        self.clients = [StoreClient(endpoint, self.config) for endpoint in known]
        new_hasher()

    def order(self, key: bytes) -> list[StoreClient]:
        """List all stores in the order in which they are asked for a prompt whose first key is ``key``."""
        return rendezvous(key, self.clients, lambda client: client.name)

    def candidates(self, key: bytes, deadline_s: float) -> Iterator[tuple[StoreClient, float]]:
        """Go through the stores for a prompt, the responsible ones first; those left alone are skipped.

        With each comes how long it may take: half of what is left until ``deadline_s``, all of it for the last.
        """
        order = [client for client in self.order(key) if not client.is_open]
        for number, client in enumerate(order):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            yield client, left_s if number == len(order) - 1 else left_s / 2

    def close(self) -> None:
        """Drop all connections. Idempotent."""
        for client in self.clients:
            client.close()

    def __enter__(self) -> Self:
        """Use as a context manager: closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


T = TypeVar("T")


def rendezvous(key: bytes, among: Sequence[T], name: Callable[[T], str]) -> list[T]:
    """Order candidates for a key: each has a score of its own, so that without the first the others keep their order.

    Highest random weight hashing (Thaler and Ravishankar, 1998).
    """
    hasher = new_hasher()
    return sorted(among, key=lambda each: bytes(hasher(name(each).encode() + b"\0" + key).digest()), reverse=True)
