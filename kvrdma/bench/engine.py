"""What the engine adds to a bare transport read, and what it takes to meet a peer. One JSON object per case.

A case moves the rows of one request between two processes of this host, in turns: once by ``Transport.read`` and
``poll`` alone, with the plan made before, once by ``Engine.pull`` until the event is there.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from kvrdma.bench.command import answer_of, count, errors_told
from kvrdma.bench.reading import best_transport
from kvrdma.config import Config
from kvrdma.engine import Engine, Event, PullDone
from kvrdma.engine.links import Home, asking, connect_engine
from kvrdma.handshake import Identity
from kvrdma.page_format import LayerSpec
from kvrdma.plan import TokenRange
from kvrdma.reference import PullReference, spans_of
from kvrdma.rows import Batch
from kvrdma.topology import EngineShape
from kvrdma.transport import Device, open_transport, poll_until

_PAIRS, _PAIRS_OF_LITTLE = 31, 301
"""What the engine adds is a twentieth of what is moved, and each time that is off by as much."""
_SECRET = "a secret for this benchmark only"  # noqa: S105 - guards nothing


@dataclass(frozen=True)
class Shape:
    """The cache of one rank, and one request in it."""

    layers: int = 32
    heads: int = 8
    head_dim: int = 128
    block: int = 16
    tokens: int = 8192
    blocks: int = 640

    @property
    def ids(self) -> list[int]:
        """Blocks of the request, scattered by a fixed permutation."""
        need = -(-self.tokens // self.block)
        return [int(i) for i in np.random.default_rng(7).permutation(self.blocks)[:need]]

    def caches(self) -> dict[str, Any]:
        """All layers in one allocation, bfloat16 held as uint16, ``[blocks, heads, tokens, keys and values]``."""
        sizes = (self.layers, self.blocks, self.heads, self.block, 2 * self.head_dim)
        store = np.zeros(sizes, np.uint16)
        store.reshape(-1)[:: 4096 // 2] = 1  # every page is there
        return {f"model.layers.{i}.self_attn.attn": store[i] for i in range(self.layers)}


LLAMA_8B = Shape()
EIGHTH = Shape(tokens=1024, blocks=96)


def open_engine(shape: Shape, name: str, transport: str, secret: str | None = None, verify: str = "none") -> Engine:
    """Open an engine of one rank."""
    spec = LayerSpec(heads=(0, shape.heads), total_heads=shape.heads, block_size=shape.block, dims="BHNC")
    identity = Identity(name, EngineShape(1, shape.heads), model={"model": "bench"})
    return Engine(shape.caches(), spec, identity, Config(transports=(transport,), secret=secret, verify=verify))


def _serve(shape: Shape, transport: str, secret: str | None, pipe: Connection) -> None:
    """The producer's process: publishes what it is asked for, engine by engine."""
    engines: dict[str, Engine] = {}
    number = 0
    while (asked := pipe.recv()) is not None:
        name, consumers = asked
        if name not in engines:
            engines[name] = open_engine(shape, name, transport, secret, verify="digest")
        number += 1
        pipe.send(engines[name].publish(number, shape.ids, shape.tokens, consumers=consumers).to_params())
    for engine in engines.values():
        engine.close()


class Producer:
    """A process with as many producer engines as it is asked for."""

    def __init__(self, shape: Shape, transport: str, secret: str | None = None) -> None:
        """Start it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(shape, transport, secret, theirs), daemon=True)
        self._process.start()

    def publish(self, name: str = "producer", consumers: int = 1) -> PullReference:
        """Publish the request anew."""
        self._pipe.send((name, consumers))
        return PullReference.from_params(answer_of(self._process, self._pipe, 120, "the producer's process"))

    def close(self) -> None:
        """End it."""
        self._pipe.send(None)
        self._process.join(20)
        self._process.kill()


def wait_for(engine: Engine, request_id: int) -> PullDone:
    """Wait for one pull to succeed.

    Raises:
        RuntimeError: it failed.
    """
    while True:
        for event in engine.wait(120):
            _require_done(event)
            if isinstance(event, PullDone) and event.request_id == request_id:
                return event


def _require_done(event: Event) -> None:
    if not isinstance(event, PullDone):
        raise RuntimeError(f"a pull of the benchmark failed: {event}")  # noqa: TRY004 - it is no wrong type


def _measure(shape: Shape, transport: str, repeats: int) -> tuple[dict[str, list[float]], int]:
    """Give the seconds of bare reads, pulls, calls of ``pull`` and of the pulls' data, and the bytes of one."""
    producer, engine = Producer(shape, transport), open_engine(shape, "consumer", transport)
    ids = shape.ids[::-1]
    engine.pull(0, producer.publish(), ids)
    wait_for(engine, 0)
    bare = BareReader(engine, transport, producer.publish())
    times: dict[str, list[float]] = {"bare": [], "pull": [], "call": [], "data": []}
    nbytes = 0
    for number in range(1, repeats + 1):
        reference = producer.publish()
        plan = bare.peer.planner.plan(spans_of(ids), spans_of(reference.blocks), TokenRange(0, shape.tokens))
        if number % 2:  # whoever comes second finds the caches warm
            times["bare"].append(bare.read(plan.sources[0].batch))
        began_s = time.perf_counter()
        engine.pull(number, reference, ids)
        times["call"].append(time.perf_counter() - began_s)
        event = wait_for(engine, number)
        times["pull"].append(time.perf_counter() - began_s)
        times["data"].append(event.data_s)
        nbytes = event.nbytes
        if not number % 2:
            times["bare"].append(bare.read(plan.sources[0].batch))
    bare.transport.close()
    engine.close()
    producer.close()
    return times, nbytes


def overhead(shape: Shape, transport: str, repeats: int) -> dict[str, object]:
    """Time pulls against bare reads of the same rows, in turns.

    ``added`` is the difference of the two, with all the noise of moving the bytes twice, and between which bounds its
    median lies in 95 of 100 such runs; ``engine`` is what a pull took beside its own data's way.
    """
    times, nbytes = _measure(shape, transport, repeats)
    bare_s, pull_s = (statistics.median(times[name]) for name in ("bare", "pull"))
    added = [pull - bare for pull, bare in zip(times["pull"], times["bare"], strict=True)]
    low, high = _median_within(added)
    engine_s = statistics.median(pull - data for pull, data in zip(times["pull"], times["data"], strict=True))
    return {
        "case": "overhead",
        "transport": transport,
        "nbytes": nbytes,
        "pages": shape.layers * len(shape.ids),
        "bare_ms": round(bare_s * 1e3, 3),
        "pull_ms": round(pull_s * 1e3, 3),
        "added_us": round(statistics.median(added) * 1e6),
        "added_percent": round(100 * statistics.median(added) / bare_s, 2),
        "added_percent_within": [round(100 * low / bare_s, 2), round(100 * high / bare_s, 2)],
        "pairs": repeats,
        "engine_us": round(engine_s * 1e6),
        "engine_percent": round(100 * engine_s / bare_s, 2),
        "call_us": round(statistics.median(times["call"]) * 1e6),
        "gb_per_s": round(nbytes / pull_s / 1e9, 2),
    }


def _median_within(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the median at 95 %, from the order of the values alone (binomial, as a normal distribution)."""
    ordered, off = sorted(values), 0.98 * math.sqrt(len(values))
    middle = (len(values) - 1) / 2
    return ordered[max(0, math.floor(middle - off))], ordered[min(len(values) - 1, math.ceil(middle + off))]


class BareReader:
    """A transport of its own, into the caches of an engine and from the same producer."""

    def __init__(self, engine: Engine, name: str, reference: PullReference) -> None:
        """Connect."""
        self.transport = open_transport(name)
        for region in engine.layout.regions:
            self.transport.register(region.addr, region.nbytes, Device())
        home = Home(engine.config, engine.identity, engine.layout, {name: self.transport}, asking(engine.config))
        self.peer = connect_engine(home, reference)

    def read(self, rows: Batch) -> float:
        """Read and wait; give the seconds."""
        began_s = time.perf_counter()
        poll_until(self.transport, self.transport.read(self.peer.links[0].peer, rows))
        return time.perf_counter() - began_s


def first_pull(transport: str, secret: str | None, repeats: int) -> dict[str, object]:
    """Time the first pull from engines never met before."""
    shape = Shape(layers=32, tokens=16, blocks=4)
    producer, engine = Producer(shape, transport, secret), open_engine(shape, "consumer", transport, secret)
    times = []
    for number in range(repeats):
        reference = producer.publish(f"engine {number}")
        began_s = time.perf_counter()
        engine.pull(number, reference, [0])
        wait_for(engine, number)
        times.append(time.perf_counter() - began_s)
    engine.close()
    producer.close()
    return {
        "case": "first pull",
        "transport": transport,
        "secret": secret is not None,
        "median_ms": round(statistics.median(times) * 1e3, 2),
        "worst_ms": round(max(times) * 1e3, 2),
    }


def digest_cost(shape: Shape, transport: str, repeats: int) -> dict[str, object]:
    """Time pulls with ``verify="digest"`` against pulls without, in turns."""
    producer = Producer(shape, transport)
    engines = {
        verify: open_engine(shape, f"consumer {verify}", transport, verify=verify) for verify in ("none", "digest")
    }
    times: dict[str, list[float]] = {verify: [] for verify in engines}
    for number in range(repeats + 1):
        for verify, engine in engines.items():
            engine.pull(number, producer.publish(), shape.ids)
            seconds = wait_for(engine, number).elapsed_s
            if number:  # the first one meets the peer
                times[verify].append(seconds)
    for engine in engines.values():
        engine.close()
    producer.close()
    plain_s, digest_s = (statistics.median(times[verify]) for verify in ("none", "digest"))
    return {
        "case": "digest",
        "transport": transport,
        "none_ms": round(plain_s * 1e3, 2),
        "digest_ms": round(digest_s * 1e3, 2),
        "times": round(digest_s / plain_s, 1),
    }


def description_size(transport: str) -> dict[str, object]:
    """Count the bytes that a rank of an 80-layer model says of itself, for 64 engines of 4 ranks."""
    spec = LayerSpec(heads=(0, 2), total_heads=8, block_size=16, dims="BHNC")
    caches = Shape(layers=80, heads=2, tokens=16, blocks=4).caches()
    shape, config = EngineShape(4, 8), Config(transports=(transport,))
    with Engine(caches, spec, Identity("an engine id of 36 characters, uuid4", shape, model={"m": "x"}), config) as one:
        nbytes = len(msgspec.msgpack.encode(one.description()))
    return {"case": "description", "transport": transport, "bytes_per_rank": nbytes, "bytes_64_peers": 256 * nbytes}


def many_consumers(transport: str, count: int) -> dict[str, object]:
    """Let one producer serve many consumer engines at once."""
    shape = Shape(layers=8, tokens=256, blocks=32)
    producer = Producer(shape, transport)
    engines = [open_engine(shape, f"consumer {n}", transport) for n in range(count)]
    reference = producer.publish(consumers=count)
    began_s = time.perf_counter()
    for engine in engines:
        engine.pull(0, reference, shape.ids)
    slowest = max(wait_for(engine, 0).elapsed_s for engine in engines)
    first_s = time.perf_counter() - began_s
    again = producer.publish(consumers=count)
    began_s = time.perf_counter()
    for engine in engines:
        engine.pull(1, again, shape.ids)
    for engine in engines:
        wait_for(engine, 1)
    again_s = time.perf_counter() - began_s
    for engine in engines:
        engine.close()
    producer.close()
    return {
        "case": "consumers",
        "transport": transport,
        "consumers": count,
        "first_ms": round(first_s * 1e3, 1),
        "slowest_first_ms": round(slowest * 1e3, 1),
        "again_ms": round(again_s * 1e3, 1),
    }


def results(transport: str, shape: Shape, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Run every case."""
    repeats, consumers = options.repeats, options.consumers
    few, many = (options.pairs, options.pairs) if options.pairs else (_PAIRS, _PAIRS_OF_LITTLE)
    yield overhead(shape, transport, many if options.eighth else few)
    yield overhead(replace(shape, tokens=shape.block * 8), transport, many)
    # As many pages of 512 bytes: over before the memory of what comes after them has gone to rest
    yield overhead(replace(shape, heads=1, head_dim=8), transport, many)
    for secret in (None, _SECRET):
        yield first_pull(transport, secret, repeats)
    yield digest_cost(replace(shape, tokens=min(shape.tokens, 1024)), transport, min(repeats, 5))
    yield description_size(transport)
    yield many_consumers(transport, consumers)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse options and print the results."""
    parser = argparse.ArgumentParser(prog="python -m kvrdma.bench.engine", description=__doc__)
    parser.add_argument("--transport", default="", help="the first installed one that reaches other processes")
    parser.add_argument("--eighth", action="store_true", help="1024 tokens instead of 8192")
    parser.add_argument("--pairs", type=count, help="pulls and bare reads; 31 of 1 GiB, 301 of less")
    parser.add_argument("--repeats", type=count, default=15, help="of everything else")
    parser.add_argument("--consumers", type=count, default=64)
    options = parser.parse_args(argv)
    name = options.transport or best_transport()
    machine = {"machine": platform.machine(), "cpus": len(os.sched_getaffinity(0)), "numpy": np.__version__}
    with errors_told(parser):
        for result in results(name, EIGHTH if options.eighth else LLAMA_8B, options):
            sys.stdout.write(json.dumps({"bench": "engine", **result, **machine}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
