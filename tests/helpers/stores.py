"""Engines over tagged caches and a store, in this process or another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from kvrdma.config import Config
from kvrdma.store import Prompt, StorePort, Stores, StoreServer
from kvrdma.testing import PeerProcess
from tests.helpers.tagged import SMALL, Model, Rank, Side

MODEL = Model(layers=2, heads=4, block=4, blocks=32)
RECORD = 2 * 4 * 4 * 64
"""Bytes of a block of ``MODEL``: layers, heads, tokens, two halves of 32 bytes."""


def cma(**changes: Any) -> Config:  # noqa: ANN401 - fields of Config
    return replace(SMALL, transports=("cma",), breaker_cooldown_s=0.5, **changes)


def tokens_of(request: int, count: int) -> list[int]:
    """The tokens of a request: any two differ from the first on."""
    return [1000 * request + position for position in range(count)]


class Client(ExitStack):
    """One engine of one rank or more, and for each rank a port to the stores."""

    def __init__(
        self,
        endpoints: Sequence[str],
        model: Model = MODEL,
        transport: str = "cma",
        config: Config | None = None,
        **options: Any,  # noqa: ANN401 - replicas, block_tokens
    ) -> None:
        super().__init__()
        block_tokens = options.pop("block_tokens", model.block)
        config = config or replace(cma(), transports=(transport,))
        self.side = self.enter_context(Side(model, transport=transport, config=config))
        self.ranks: list[Rank] = self.side.ranks
        try:
            self.ports = [
                StorePort(rank.engine, self.enter_context(Stores(endpoints, config, **options)), block_tokens)
                for rank in self.ranks
            ]
        except BaseException:
            self.close()
            raise
        self.port, self.cache = self.ports[0], self.ranks[0].cache

    def prompt(self, request: int, count: int, blocks: Sequence[int], rank: int = 0) -> Prompt:
        return Prompt(self.ports[rank].keys(tokens_of(request, count)), blocks)

    def put(self, request: int, count: int, blocks: Sequence[int], timeout_s: float = 10.0) -> bool:
        """Compute a request into its blocks and offer it, on every rank."""
        done = []
        for number, rank in enumerate(self.ranks):
            rank.cache.write(request, blocks, range(count))
            done += self.ports[number].put([self.prompt(request, count, blocks, number)], timeout_s)
        return all(done)

    def get(self, request: int, count: int, blocks: Sequence[int], timeout_s: float = 10.0) -> int:
        """Fetch a request into blocks of poison, check every byte, and say how many tokens came."""
        found = set()
        for number, rank in enumerate(self.ranks):
            rank.cache.poison()
            (tokens,) = self.ports[number].get([self.prompt(request, count, blocks, number)], timeout_s)
            assert rank.cache.wrong(request, blocks, range(tokens)) == []
            found.add(tokens)
        (tokens,) = found
        return tokens


def until(holds: Callable[[], bool], what: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Wait until something holds."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.005)


# Functions for PeerProcess.call


def open_store(state: SimpleNamespace, capacity: int, config: Config) -> str:
    state.store = StoreServer(capacity, config)
    return str(state.store.endpoint)


def store_stats(state: SimpleNamespace) -> dict[str, float]:
    result: dict[str, float] = state.store.stats()
    return result


def close_store(state: SimpleNamespace) -> None:
    state.store.close()


def start_store(capacity: int = 1 << 20, config: Config | None = None) -> tuple[PeerProcess, str]:
    process = PeerProcess()
    return process, process.call(open_store, capacity, config or cma())
