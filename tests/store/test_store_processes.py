"""A store in a process of its own that dies, freezes or is restarted, and users that do: it costs misses only."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrdma.sidechannel import Endpoint, SideChannelClient
from kvrdma.testing import PeerProcess
from kvrdma.wire import StoreFound, StoreLookup
from tests.helpers import stores as at
from tests.helpers.ports import fixed_port
from tests.helpers.stores import Client, cma, start_store, tokens_of, until
from tests.helpers.tagged import Model, busy

pytestmark = pytest.mark.needs("cma")

BLOCKS = [3, 1, 4, 0, 5, 9, 2, 6]
SLACK_S = 8.0
"""What a busy machine may add to a deadline."""


@pytest.fixture
def store() -> Iterator[tuple[PeerProcess, str]]:
    process, endpoint = start_store(config=cma(bind=f"127.0.0.1:{fixed_port()}"))
    yield process, endpoint
    process.kill()


def test_a_dead_store_is_a_miss_and_a_restarted_one_is_empty_and_works(store: tuple[PeerProcess, str]) -> None:
    process, endpoint = store
    with Client([endpoint]) as one:
        assert one.put(1, 29, BLOCKS)
        assert one.get(1, 29, BLOCKS) == 29
        process.kill()
        began_s = time.monotonic()
        for request in range(1, 4):
            assert one.get(request, 29, BLOCKS, 0.5) == 0
            assert not one.put(request, 29, BLOCKS, 0.5)
        assert time.monotonic() - began_s < 6 * 0.5 + SLACK_S
        assert one.ranks[0].engine.stats()["leases"] == 0
        again, same = start_store(config=cma(bind=endpoint))
        assert same == endpoint
        try:
            until(lambda: one.put(1, 21, BLOCKS), lambda: one.port.counts)
            assert one.get(1, 29, BLOCKS) == 20
            assert one.get(1, 21, BLOCKS) == 21
            assert again.call(at.store_stats)["fills_failed"] == 0
            assert busy(one.ranks[0].engine) == {}
        finally:
            again.kill()


def test_killed_amid_everything(store: tuple[PeerProcess, str]) -> None:
    process, endpoint = store
    with Client([endpoint]) as one, Client([endpoint]) as two:
        for request in range(4):
            one.put(request, 32, BLOCKS)
        keys = [two.prompt(request, 32, [8 * request + n for n in range(8)]) for request in range(4)]
        os.kill(process.pid, signal.SIGKILL)
        assert sum(two.port.get(keys, 2.0)) % 32 == 0
        assert not any(two.port.get(keys, 1.0))
        assert busy(two.ranks[0].engine) == {}


def test_a_frozen_store_is_a_miss_within_the_deadline_and_harms_nothing_when_it_thaws(
    store: tuple[PeerProcess, str],
) -> None:
    process, endpoint = store
    with Client([endpoint]) as one, Client([endpoint]) as two:
        assert one.put(1, 32, BLOCKS)
        assert two.get(1, 32, BLOCKS) == 32
        process.signal(signal.SIGSTOP)
        began_s = time.monotonic()
        assert two.get(1, 32, BLOCKS, 0.5) == 0
        assert not one.put(2, 32, BLOCKS, 0.5)
        assert time.monotonic() - began_s < 1.0 + SLACK_S
        assert one.ranks[0].engine.stats()["leases"] == 0
        one.cache.write(3, BLOCKS, range(32))  # the blocks are ours again: the store's late read must not count
        process.signal(signal.SIGCONT)
        until(lambda: two.get(1, 32, BLOCKS, 1.0) == 32, lambda: two.port.counts)
        until(lambda: process.call(at.store_stats)["filling"] == 0, lambda: process.call(at.store_stats))
        assert two.get(2, 32, BLOCKS) == 0
        until(lambda: one.put(2, 32, BLOCKS), lambda: one.port.counts)
        assert two.get(2, 32, BLOCKS) == 32
        until(lambda: process.call(at.store_stats)["held"] == 0, lambda: process.call(at.store_stats))


def test_what_was_found_is_read_from_a_frozen_store(store: tuple[PeerProcess, str]) -> None:
    """Its processor has no part in a read by cma."""
    process, endpoint = store
    with Client([endpoint]) as one:
        one.put(1, 32, BLOCKS)
        assert one.get(1, 32, BLOCKS) == 32
        one.cache.poison()
        fetch = one.port._start(one.prompt(1, 32, BLOCKS), time.monotonic() + 5, time.monotonic() + 5)
        process.signal(signal.SIGSTOP)
        assert not isinstance(fetch, int)
        assert one.port._finish(fetch, time.monotonic() + 5) == 32
        assert one.cache.wrong(1, BLOCKS, range(32)) == []
        process.signal(signal.SIGCONT)


def test_a_frozen_store_beside_a_healthy_one(store: tuple[PeerProcess, str]) -> None:
    process, endpoint = store
    other, healthy = start_store()
    try:
        with Client([endpoint, healthy], config=cma(breaker_threshold=1)) as one:
            process.signal(signal.SIGSTOP)
            for request in range(20):
                one.put(request, 8, BLOCKS, 0.3)  # one of them finds out
            for request in range(100, 110):
                one.port._stores.clients[0]._breaker.record_failure()  # stays open
                assert one.put(request, 8, BLOCKS)
                assert one.get(request, 8, BLOCKS) == 8
            assert other.call(at.store_stats)["blocks"] >= 20
            process.signal(signal.SIGCONT)
    finally:
        other.kill()


def _hold(state: SimpleNamespace, endpoint: str) -> int:
    state.client = Client([endpoint])
    state.raw = SideChannelClient(Endpoint.parse(endpoint))
    keys = state.client.port.keys(tokens_of(1, 32)).joined()
    reply = state.raw.request(StoreLookup(state.client.port.fingerprint, keys, 32), 5.0)
    assert isinstance(reply, StoreFound)
    return reply.blocks


def test_a_reader_that_dies_holds_its_blocks_for_one_lease_only() -> None:
    process, endpoint = start_store(config=cma(lease_s=1.0))
    reader = PeerProcess()
    try:
        with Client([endpoint]) as one:
            one.put(1, 32, BLOCKS)
            assert reader.call(_hold, endpoint) == 8
            assert process.call(at.store_stats)["held"] == 1
            reader.kill()
            until(lambda: process.call(at.store_stats)["held"] == 0, lambda: process.call(at.store_stats))
            assert one.get(1, 32, BLOCKS) == 32
    finally:
        reader.kill()
        process.kill()


def _offer_and_freeze(state: SimpleNamespace, endpoint: str, transport: str) -> None:
    state.client = Client([endpoint], transport=transport)
    state.client.cache.write(1, BLOCKS, range(32))
    state.client.port._offer(state.client.prompt(1, 32, BLOCKS), time.monotonic() + 60, {}, 0)
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.needs("ucx")
def test_a_sender_that_freezes_amid_its_offer_costs_others_nothing() -> None:
    process, endpoint = start_store(config=replace(cma(pull_timeout_s=2.0), transports=("ucx",)))
    sender = PeerProcess()
    try:
        with Client([endpoint], transport="ucx") as one:
            assert one.put(5, 32, BLOCKS)
            sender._connection.send((_offer_and_freeze, (endpoint, "ucx")))
            until(lambda: process.call(at.store_stats)["offers"] >= 2, lambda: process.call(at.store_stats))
            for request in range(6, 10):
                assert one.put(request, 32, BLOCKS)
                assert one.get(request, 32, BLOCKS) == 32
            assert one.get(1, 32, BLOCKS) in {0, 32}
            assert process.call(at.store_stats)["blocks"] >= 40
    finally:
        sender.kill()
        process.kill()


@pytest.mark.needs("ucx")
def test_over_the_network_and_frozen() -> None:
    process, endpoint = start_store(config=replace(cma(), transports=("ucx",)))
    try:
        with Client([endpoint], transport="ucx") as one, Client([endpoint], transport="ucx") as two:
            assert one.put(1, 29, BLOCKS)
            assert two.get(1, 29, BLOCKS) == 29
            fetch = two.port._start(two.prompt(1, 29, BLOCKS), time.monotonic() + 2, time.monotonic() + 2)
            process.signal(signal.SIGSTOP)
            began_s = time.monotonic()
            assert isinstance(fetch, int) or two.port._finish(fetch, time.monotonic() + 2) in {0, 29}
            assert two.get(1, 29, BLOCKS, 1.0) == 0
            assert time.monotonic() - began_s < 2 + 5 + 1 + SLACK_S
            process.signal(signal.SIGCONT)
            until(lambda: two.get(1, 29, BLOCKS, 2.0) == 29, lambda: two.port.counts, timeout_s=30)
    finally:
        process.kill()


def _offer(state: SimpleNamespace, endpoint: str, model: Model, request: int) -> None:
    """Offer a prompt that fills the cache, and wait for nothing."""
    if not hasattr(state, "client"):
        state.client = Client([endpoint], model)
    blocks = list(range(model.blocks))
    count = model.blocks * model.block
    state.client.cache.write(request, blocks, range(count))
    state.client.port._offer(state.client.prompt(request, count, blocks), time.monotonic() + 60, {}, 0)


def test_senders_that_are_killed_amid_a_read_leave_whole_blocks_or_none() -> None:
    model = Model(layers=8, heads=4, block=16, blocks=256)
    process, endpoint = start_store(capacity=64 << 20)
    count = model.blocks * model.block
    try:
        with Client([endpoint], model) as reader:
            for request in range(6):
                sender = PeerProcess()
                sender.call(_offer, endpoint, model, request)
                time.sleep(0.002 * request)
                sender.kill()
                assert reader.get(request, count, range(model.blocks)) in {0, count}
            until(lambda: process.call(at.store_stats)["filling"] == 0, lambda: process.call(at.store_stats), 40)
            for request in range(6):
                assert reader.get(request, count, range(model.blocks)) in {0, count}
            assert reader.put(9, count, range(model.blocks))
            assert reader.get(9, count, range(model.blocks)) == count
    finally:
        process.kill()


def test_a_secret_keeps_others_out() -> None:
    secret = "a secret of this test"
    process, endpoint = start_store(config=cma(secret=secret))
    try:
        with Client([endpoint], config=cma(secret=secret)) as one, Client([endpoint]) as two:
            assert one.put(1, 29, BLOCKS)
            assert one.get(1, 29, BLOCKS) == 29
            assert two.get(1, 29, BLOCKS, 2.0) == 0
            assert not two.put(2, 29, BLOCKS, 2.0)
            assert process.call(at.store_stats)["offers"] == 1
    finally:
        process.kill()


def _fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _rss_mb(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def test_nothing_leaks(store: tuple[PeerProcess, str]) -> None:
    process, endpoint = store
    with Client([endpoint]) as one:

        def cycle(request: int) -> None:
            one.put(request, 32, BLOCKS)
            assert one.get(request, 32, BLOCKS) == 32

        for request in range(100):  # more than fits
            cycle(request)
        gc.collect()  # what tests before this one have left
        before = _fds(process.pid), _fds(os.getpid())
        rss = _rss_mb(process.pid), _rss_mb(os.getpid())
        for request in range(100, 700):
            cycle(request)
        until(lambda: process.call(at.store_stats)["held"] == 0, lambda: process.call(at.store_stats))
        assert _fds(process.pid) == before[0]
        assert _fds(os.getpid()) <= before[1]  # fewer, where something of another test has ended meanwhile
        assert _rss_mb(process.pid) - rss[0] < 8
        assert _rss_mb(os.getpid()) - rss[1] < 8
        stats = process.call(at.store_stats)
        assert stats["filling"] == stats["queued"] == 0
        assert one.port._pulls == {}
        assert one.port._open == set()
        assert one.ranks[0].engine.stats()["leases"] == 0
        assert busy(one.ranks[0].engine) == {}
