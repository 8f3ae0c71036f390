"""A producer in a process of its own, that reuses its blocks as fast as it can; functions for ``PeerProcess.call``."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvrdma.config import Config
from kvrdma.engine import Ended
from kvrdma.testing import PeerProcess
from kvrdma.transport import Transport
from tests.helpers.tagged import Model, Side


def open_side(
    state: SimpleNamespace, model: Model, name: str, transport: str | Callable[[], Transport], config: Config
) -> int:
    """Open one engine of one rank; returns its port."""
    state.side = Side(model, name, transport, config)
    state.rank = state.side.ranks[0]
    state.free = list(range(model.blocks))
    state.live = {}
    state.requests = 0
    state.generation = 0
    state.rng = random.Random(1)
    state.ends = {}
    state.stop = threading.Event()
    state.lock = threading.Lock()
    state.reuser = threading.Thread(target=_reuse, args=(state,), daemon=True)
    state.reuser.start()
    return int(state.rank.engine.endpoint.port)


def _reuse(state: SimpleNamespace) -> None:
    """Overwrite the blocks of whatever has ended with the rows of a request nobody asked for."""
    while not state.stop.is_set():
        for event in state.rank.engine.wait(0.05):
            assert isinstance(event, Ended)
            with state.lock:
                blocks, tokens = state.live.pop(event.request_id)
                state.rank.cache.write(-1, blocks, range(tokens), generation=-1)
                state.free += blocks
                state.ends[event.how.name] = state.ends.get(event.how.name, 0) + 1


def publish(state: SimpleNamespace, count: int, blocks: int, first: int) -> list[tuple[int, dict[str, Any]]]:
    """Compute and publish up to ``count`` requests; returns what was published, by number."""
    made: list[tuple[int, dict[str, Any]]] = []
    for number in range(first, first + count):
        with state.lock:
            if len(state.free) < blocks:
                return made
            ids = [state.free.pop() for _ in range(blocks)]
            tokens = blocks * state.side.model.block - number % 3
            state.live[number] = ids, tokens
            state.rank.cache.write(number, ids, range(tokens))
            made.append((number, state.rank.engine.publish(number, ids, tokens).to_params()))
    return made


def withdraw_later(state: SimpleNamespace, within_s: float) -> None:
    """Withdraw everything that is published now, one after another, within some time; returns at once."""
    numbers = list(state.live)

    def run() -> None:
        for number in numbers:
            state.stop.wait(state.rng.uniform(0, 2 * within_s / max(1, len(numbers))))
            state.rank.engine.withdraw(number)

    threading.Thread(target=run, daemon=True).start()


def ends(state: SimpleNamespace) -> dict[str, int]:
    """How the publications ended so far, and how many have not."""
    return {**state.ends, "live": len(state.live), "free": len(state.free)}


def stats(state: SimpleNamespace) -> dict[str, int]:
    result: dict[str, int] = state.rank.engine.stats()
    return result


def close(state: SimpleNamespace) -> None:
    state.stop.set()
    state.reuser.join()
    state.side.close()


def start(model: Model, name: str, transport: str | Callable[[], Transport], config: Config) -> tuple[PeerProcess, int]:
    """Start such a process."""
    process = PeerProcess()
    return process, process.call(open_side, model, name, transport, config)


def is_poison(store: np.ndarray[Any, np.dtype[np.int32]], blocks: list[int]) -> bool:
    """Whether these blocks hold nothing but poison."""
    return bool((store[:, blocks] == np.frombuffer(b"\xa5" * 4, np.int32)[0]).all())
