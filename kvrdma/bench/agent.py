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

from kvrdma.bench.command import count, errors_told
from kvrdma.bench.engine import EIGHTH, LLAMA_8B, BareReader, Shape
from kvrdma.bench.lookups import lookups, lookups_alone
from kvrdma.bench.reading import best_transport
from kvrdma.bench.stores import StoreProcess, User, request_nbytes, room
from kvrdma.plan import TokenRange
from kvrdma.reference import spans_of
from kvrdma.store.filling import read_reference
from kvrdma.store.keys import new_hasher
from kvrdma.store.server import freeze_gc_heap

WARM = replace(LLAMA_8B, tokens=4096, blocks=320)
WARM_EIGHTH = replace(EIGHTH, tokens=512, blocks=48)


def warm_prefix(shape: Shape, transport: str, repeats: int) -> dict[str, object]:
    """Time fetching a prefix out of the store against bare reads of the same rows, in turns."""
    store = StoreProcess(room(shape), transport)
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
    store = StoreProcess(room(shape), transport)
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
    yield lookups_alone(transport, options.lookups)
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
        freeze_gc_heap()  # as a server of vLLM does with its own
        for result in results(options, options.transport or best_transport()):
            sys.stdout.write(json.dumps({"bench": "agent", **result, **machine}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
