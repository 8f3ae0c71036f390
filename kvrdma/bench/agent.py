"""What a remote KV store costs: a warm prefix against a bare read of the same rows, lookups, readers at once.

The store runs in a process of its own, so that its CPU time is its own. One JSON object per case.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np

from kvrdma.bench.command import answer_of, count, errors_told
from kvrdma.bench.echo import Echo, SocketEcho
from kvrdma.bench.engine import EIGHTH, LLAMA_8B, BareReader, Shape, open_engine
from kvrdma.bench.reading import best_transport
from kvrdma.bench.waits import waits_of
from kvrdma.config import Config
from kvrdma.plan import TokenRange
from kvrdma.reference import spans_of
from kvrdma.store import Prompt, StorePort, Stores, StoreServer
from kvrdma.store.filling import read_reference
from kvrdma.store.keys import KEY_NBYTES, new_hasher
from kvrdma.wire import AskStore, Noted, StoreFound, StoreLookup, StoreNumbers, StoreRelease

WARM = replace(LLAMA_8B, tokens=4096, blocks=320)
WARM_EIGHTH = replace(EIGHTH, tokens=512, blocks=48)
_TIMEOUT_S = 120.0
_STORE_BUSY_S = 0.0002
"""What a store takes for a lookup of 512 blocks."""
_SPARE = 1.5
"""Capacity, in sizes of what is put there."""


def request_nbytes(shape: Shape) -> int:
    """Bytes of a request of that shape."""
    return shape.layers * shape.heads * shape.head_dim * 2 * 2 * shape.tokens


def _room(shape: Shape) -> int:
    return max(4 << 20, int(_SPARE * request_nbytes(shape)))


def _serve(capacity: int, transport: str, pipe: Connection) -> None:
    with StoreServer(capacity, Config(transports=(transport,), lease_s=10.0)) as store:
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
        keys = self.prompt(number).keys
        asked = StoreLookup(self.port.fingerprint, keys.joined(), keys.num_tokens)
        found = self.stores.clients[0].ask(asked, StoreFound, 5.0)
        if found is None or not found.lease:
            raise RuntimeError(f"the store found {found}")
        return found

    def close(self) -> None:
        """Close it."""
        self.engine.close()
        self.stores.close()


def warm_prefix(shape: Shape, transport: str, repeats: int) -> dict[str, object]:
    """Time fetching a prefix out of the store against bare reads of the same rows, in turns."""
    store = StoreProcess(_room(shape), transport)
    sender = User(shape, store.endpoint, transport, "sender")
    put_s = sender.put()
    sender.close()
    user = User(shape, store.endpoint, transport, "receiver")
    user.get()  # meets the store
    held = user.lookup()
    reference = read_reference(held.reference)
    bare = BareReader(user.engine, transport, reference)
    plan = bare.peer.planner.plan(spans_of(shape.ids), spans_of(reference.blocks), TokenRange(0, shape.tokens))
    rows = plan.sources[0].batch
    bare.read(rows)
    times: dict[str, list[float]] = {"bare": [], "get": []}
    cpu_s = user.cpu_s()
    for number in range(repeats):
        if number % 2:  # whoever comes second finds the caches warm
            times["bare"].append(bare.read(rows))
        times["get"].append(user.get())
        if not number % 2:
            times["bare"].append(bare.read(rows))
    cpu_s = user.cpu_s() - cpu_s
    bare.transport.close()
    user.close()
    store.close()
    nbytes = request_nbytes(shape)
    bare_s, get_s = (statistics.median(times[name]) for name in ("bare", "get"))
    ratios = [one / two for one, two in zip(times["bare"], times["get"], strict=True)]
    return {
        "case": "warm prefix",
        "transport": transport,
        "nbytes": nbytes,
        "tokens": shape.tokens,
        "bare_ms": round(bare_s * 1e3, 2),
        "get_ms": round(get_s * 1e3, 2),
        "of_bare": round(statistics.median(ratios), 3),
        "of_bare_min_max": [round(min(ratios), 3), round(max(ratios), 3)],
        "gb_per_s": round(nbytes / get_s / 1e9, 2),
        "put_gb_per_s": round(nbytes / put_s / 1e9, 2),
        "store_cpu_ms": round(cpu_s / repeats * 1e3, 2),
    }


def lookups(transport: str, count: int, blocks: int = 512) -> dict[str, object]:
    """Time lookups of long prefixes, each a message and its answer, with leases taken and given back in between.

    In turns with them bare messages of the same sizes make the same way to a process that is busy for as long as a
    store's median, and as many bytes go over one socket to a process that does nothing: how often those are late is
    this host's doing.

    ``within_1_ms_but_for_waits``: the same without what the threads of both processes waited for a processor beyond
    their median, while the kernel ran something else there.
    """
    shape = Shape(layers=1, heads=1, head_dim=16, tokens=16 * blocks, blocks=blocks)
    store = StoreProcess(_room(shape), transport)
    user = User(shape, store.endpoint, transport, "asking")
    user.put()
    hashing, asking, waited = [], [], []
    client = user.stores.clients[0]
    found = user.lookup()
    client.ask(StoreRelease(found.lease), Noted, 5.0)
    sizes = KEY_NBYTES * blocks, len(found.reference)
    ours = waits_of((os.getpid(), store.pid))
    with ours as waits_s, Echo(*sizes, _STORE_BUSY_S) as echo, SocketEcho(*sizes) as sockets:
        echoed, bare = [], []
        for _ in range(count):
            began_s = time.perf_counter()
            keys = user.prompt().keys
            before_s = waits_s()
            hashed_s = time.perf_counter()
            answer = client.ask(StoreLookup(user.port.fingerprint, keys.joined(), keys.num_tokens), StoreFound, 5.0)
            asking.append(time.perf_counter() - hashed_s)
            waited.append(waits_s() - before_s)
            hashing.append(hashed_s - began_s)
            if answer is None or answer.blocks != blocks:
                raise RuntimeError(f"the store found {answer}")
            client.ask(StoreRelease(answer.lease), Noted, 5.0)
            echoed.append(echo.ask())
            bare.append(sockets.ask())
    user.close()
    store.close()
    return {
        "case": "lookup",
        "transport": transport,
        "blocks": blocks,
        "lookups": count,
        "messages_each": 1,
        **_spread(asking),
        "within_1_ms_but_for_waits": _spread(_without_waits(asking, waited))["within_1_ms"],
        **{f"echo_{name}": value for name, value in _spread(echoed).items()},
        **{f"socket_{name}": value for name, value in _spread(bare).items()},
        "hash_median_ms": round(statistics.median(hashing) * 1e3, 3),
    }


def _without_waits(times_s: Sequence[float], waited_s: Sequence[float]) -> list[float]:
    usual_s = statistics.median(waited_s)
    return [time_s - max(0.0, wait_s - usual_s) for time_s, wait_s in zip(times_s, waited_s, strict=True)]


def _spread(times_s: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    return {
        "median_ms": round(statistics.median(ordered) * 1e3, 3),
        "p99_ms": round(ordered[int(0.99 * (len(ordered) - 1))] * 1e3, 3),
        "worst_ms": round(ordered[-1] * 1e3, 3),
        "within_1_ms": round(sum(each <= 1e-3 for each in ordered) / len(ordered), 4),
    }


def _read_often(shape: Shape, endpoint: str, transport: str, times: int, pipe: Connection) -> None:
    user = User(shape, endpoint, transport, f"reader {os.getpid()}")
    user.get()
    pipe.send("ready")
    pipe.recv()
    pipe.send([user.get() for _ in range(times)])
    user.close()


def _idle_cpu(user: User) -> float:
    """CPU seconds per second of a store that nobody uses."""
    cpu_s, began_s = user.cpu_s(), time.perf_counter()
    time.sleep(2)
    return (user.cpu_s() - cpu_s) / (time.perf_counter() - began_s)


def readers(shape: Shape, transport: str, count: int, times: int) -> dict[str, object]:
    """Let processes read the store at once, and see what that costs the store."""
    store = StoreProcess(_room(shape), transport)
    sender = User(shape, store.endpoint, transport, "sender")
    sender.put()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(count):
        ours, theirs = context.Pipe()
        arguments = (shape, store.endpoint, transport, times, theirs)
        processes.append(context.Process(target=_read_often, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    idle_s = _idle_cpu(sender)
    cpu_s = sender.cpu_s()
    began_s = time.perf_counter()
    for pipe in pipes:
        pipe.send("go")
    each = [seconds for pipe in pipes for seconds in pipe.recv()]
    elapsed_s = time.perf_counter() - began_s
    cpu_s = sender.cpu_s() - cpu_s
    for process in processes:
        process.join(20)
        process.kill()
    sender.close()
    store.close()
    nbytes = request_nbytes(shape) * count * times
    return {
        "case": "readers",
        "transport": transport,
        "readers": count,
        "reads": count * times,
        "nbytes": nbytes,
        "gb_per_s": round(nbytes / elapsed_s / 1e9, 2),
        "median_ms": round(statistics.median(each) * 1e3, 1),
        "store_cpu_ms": round(cpu_s * 1e3, 1),
        "store_cpu_ms_per_read": round(cpu_s / (count * times) * 1e3, 2),
        "store_cpu_percent": round(100 * cpu_s / elapsed_s, 1),
        "store_cpu_percent_idle": round(100 * idle_s, 1),
    }


def results(options: argparse.Namespace, transport: str) -> Iterator[dict[str, object]]:
    """Run every case."""
    shape = WARM_EIGHTH if options.eighth else WARM
    yield warm_prefix(shape, transport, options.repeats)
    yield lookups(transport, options.lookups)
    yield readers(WARM_EIGHTH, transport, options.readers, options.repeats)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse options and print the results."""
    parser = argparse.ArgumentParser(prog="python -m kvrdma.bench.agent", description=__doc__)
    parser.add_argument("--transport", default="", help="the first installed one that reaches other processes")
    parser.add_argument("--eighth", action="store_true", help="512 tokens instead of 4096")
    parser.add_argument("--repeats", type=count, default=11)
    parser.add_argument("--lookups", type=count, default=1000)
    parser.add_argument("--readers", type=count, default=8)
    options = parser.parse_args(argv)
    machine = {"machine": platform.machine(), "cpus": len(os.sched_getaffinity(0)), "numpy": np.__version__}
    with errors_told(parser):
        new_hasher()  # here rather than in the store's process
        for result in results(options, options.transport or best_transport()):
            sys.stdout.write(json.dumps({"bench": "agent", **result, **machine}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
