"""``StoreServer``: keeps KV blocks of many engines in its memory, filled and read by one-sided reads.

Three kinds of messages: senders offer the blocks of a prompt (the store reads them), readers look a prompt up (they
read the store), and anybody may ask for numbers. Its own threads never touch the bytes that readers fetch.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, replace
from types import TracebackType
from typing import Self

from kvrdma import __version__
from kvrdma.config import Config
from kvrdma.engine.opening import open_transports
from kvrdma.errors import MessageError
from kvrdma.sidechannel import Endpoint, SideChannelServer
from kvrdma.store.filling import Filler
from kvrdma.store.keys import new_hasher
from kvrdma.store.shelf import Shelf
from kvrdma.wire import (
    AskStore,
    Message,
    Noted,
    StoreLookup,
    StoreNumbers,
    StoreOffer,
    StoreOffered,
    StoreRelease,
    askers_of,
)

_LEASE_S = 10.0
_PEER_IDLE_S = 300.0


def freeze_gc_heap() -> None:
    """Let the garbage collector of this process look at nothing again that is there now.

    A full collection stops every thread for a millisecond or more, once in some thousand lookups. For a process that is
    a store, or is as busy; what is there now is not collected any more.
    """
    gc.collect()
    gc.freeze()


class StoreServer:
    """A store that runs until ``close``. What it holds lives and dies with it."""

    def __init__(self, capacity: int, config: Config | None = None, *, max_families: int = 8) -> None:
        """Reserve the memory and listen at ``config.bind``.

        Args:
            capacity: bytes for blocks. Taken as it fills, or at once where a transport pins memory.
            config: settings; ``Config.from_env()`` by default. A reader that dies holds its blocks for ``lease_s``,
                at most 10 s.
            max_families: models, splits over ranks and block sizes at the same time.

        Raises:
            ConfigError: a setting does not work, or a package is missing.
            TransportError: a transport that is set does not work.
        """
        new_hasher()  # here rather than at the first offer
        config = config or Config.from_env()
        for transport in open_transports(config)[0]:
            transport.close()
        bind = Endpoint.parse(config.bind)
        told = bind.as_told(config.advertise)
        config = replace(
            config, lease_s=min(config.lease_s, _LEASE_S), peer_idle_s=min(config.peer_idle_s, _PEER_IDLE_S)
        )
        self._started_s = time.monotonic()
        self._shelf = Shelf(capacity, max_families, config)
        self._filler = Filler(self._shelf)
        try:
            self._server = SideChannelServer(bind, self._answer, config.secret, insecure=config.insecure)
        except BaseException:
            self._filler.close()
            raise
        self.endpoint = Endpoint(told.host, self._server.endpoint.port)

    @property
    def capacity(self) -> int:
        """Bytes for blocks."""
        return self._shelf.capacity

    @property
    def alive(self) -> bool:
        """Whether it still works: until ``close``, or a defect."""
        return self._server.alive and self._filler.alive

    def stats(self) -> dict[str, float]:
        """Give counts since the start and what it holds now; bytes and seconds."""
        return {
            **{name: float(value) for name, value in asdict(self._shelf.numbers).items()},
            **self._shelf.sizes(),
            "queued": self._filler.queued,
            "malformed": self._server.counts.malformed,
            "rejected": self._server.counts.rejected,
            "cpu_seconds": time.process_time(),
            "uptime_seconds": time.monotonic() - self._started_s,
        }

    def _answer(self, message: Message) -> Message:
        if isinstance(message, StoreLookup):
            return self._shelf.lookup(message)
        if isinstance(message, StoreOffer):
            return self._offered(message)
        if isinstance(message, StoreRelease):
            self._shelf.release(message.lease)
            return Noted()
        if isinstance(message, AskStore):
            return StoreNumbers(__version__, self.stats())
        raise MessageError(f"a store listens here, and does not answer {askers_of(message)}: check the port")

    def _offered(self, offer: StoreOffer) -> StoreOffered:
        numbers = self._shelf.numbers
        numbers.offers += 1
        self._shelf.follow_up()
        missing = self._shelf.missing(offer)
        if not missing:
            return StoreOffered(accepted=False, missing=0, reason="everything is there, or on its way")
        refusal = self._filler.offer(offer)
        numbers.declined += bool(refusal)
        return StoreOffered(accepted=not refusal, missing=missing, reason=refusal)

    def close(self) -> None:
        """Stop answering, revoke every lease, let go of the memory. Takes some seconds at most. Idempotent.

        Raises:
            BaseException: the defect by which the side channel ended, if it did.
        """
        try:
            self._server.close()
        finally:
            self._filler.close()
            self._shelf.close()

    def __enter__(self) -> Self:
        """Use as a context manager: closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
