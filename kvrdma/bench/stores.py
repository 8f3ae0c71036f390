"""A store in a process of its own, and an engine that uses it."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from kvrdma.bench.command import answer_of
from kvrdma.bench.engine import Shape, open_engine
from kvrdma.config import Config
from kvrdma.store import Prompt, StorePort, Stores, StoreServer
from kvrdma.store.keys import PrefixKeys
from kvrdma.store.server import freeze_gc_heap
from kvrdma.wire import AskStore, Noted, StoreFound, StoreLookup, StoreNumbers, StoreRelease

_TIMEOUT_S = 120.0
_SPARE = 1.5
"""Capacity, in sizes of what is put there."""


def request_nbytes(shape: Shape) -> int:
    """Bytes of a request of that shape."""
    return shape.layers * shape.heads * shape.head_dim * 2 * 2 * shape.tokens


def room(shape: Shape) -> int:
    """Bytes of a store that holds such a request, and half as much again."""
    return max(4 << 20, int(_SPARE * request_nbytes(shape)))


def _serve(capacity: int, transport: str, pipe: Connection) -> None:
    with StoreServer(capacity, Config(transports=(transport,), lease_s=10.0)) as store:
        freeze_gc_heap()  # as `kvrdma store serve` does
        pipe.send(str(store.endpoint))
        pipe.recv()


class StoreProcess:
    """A store in another process."""

    def __init__(self, capacity: int, transport: str) -> None:
        """Start it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(capacity, transport, theirs), daemon=True)
        self._process.start()
        self.endpoint: str = answer_of(self._process, self._pipe, _TIMEOUT_S, "the store's process")

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid
        return self._process.pid

    def close(self) -> None:
        """End it."""
        self._pipe.send(None)
        self._process.join(20)
        self._process.kill()


class User:
    """An engine with its port to a store."""

    def __init__(self, shape: Shape, endpoint: str, transport: str, name: str) -> None:
        """Open it."""
        self.shape = shape
        self.engine = open_engine(shape, name, transport)
        self.stores = Stores([endpoint], Config())
        self.port = StorePort(self.engine, self.stores, shape.block)

    def prompt(self, number: int = 0) -> Prompt:
        """A prompt as long as the shape's request, different for each number."""
        tokens = np.arange(self.shape.tokens) + 1_000_003 * number
        return Prompt(self.port.keys(tokens), self.shape.ids)  # type: ignore[arg-type] # arrays are fine

    def put(self, number: int = 0) -> float:
        """Offer a prompt; the seconds until the store had it.

        Raises:
            RuntimeError: it has not.
        """
        prompt = self.prompt(number)
        began_s = time.perf_counter()
        self.port.put([prompt], _TIMEOUT_S)
        seconds = time.perf_counter() - began_s
        if self.port.look([prompt.keys], 5.0) != [self.shape.tokens]:
            raise RuntimeError("the store did not take what the benchmark offered")
        return seconds

    def get(self, number: int = 0) -> float:
        """Fetch a prompt; the seconds from its tokens to its last byte in place.

        Raises:
            RuntimeError: the store has less.
        """
        began_s = time.perf_counter()
        (tokens,) = self.port.get([self.prompt(number)], _TIMEOUT_S)
        seconds = time.perf_counter() - began_s
        if tokens != self.shape.tokens:
            raise RuntimeError(f"the store gave {tokens} of {self.shape.tokens} tokens")
        return seconds

    def cpu_s(self) -> float:
        """CPU time that the store's process has used so far."""
        reply = self.stores.clients[0].ask(AskStore(), StoreNumbers, 5.0)
        if reply is None:
            raise RuntimeError("the store does not answer")
        return reply.numbers["cpu_seconds"]

    def lookup(self, number: int = 0) -> StoreFound:
        """Look a prompt up and hold it, by one message."""
        return self.ask(self.prompt(number).keys)

    def ask(self, keys: PrefixKeys) -> StoreFound:
        """Likewise, with keys that are there already.

        Raises:
            RuntimeError: not all of it is in the store.
        """
        question = StoreLookup(self.port.fingerprint, keys.joined(), keys.num_tokens)
        found = self.stores.clients[0].ask(question, StoreFound, 5.0)
        if found is None or found.blocks != len(keys.keys):
            raise RuntimeError(f"the store found {found}")
        return found

    def release(self, found: StoreFound) -> None:
        """Give a lookup's lease back."""
        self.stores.clients[0].ask(StoreRelease(found.lease), Noted, 5.0)

    def close(self) -> None:
        """Close it."""
        self.engine.close()
        self.stores.close()
