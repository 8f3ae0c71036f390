"""States of which a store has given up any pages, with several versions of them about: one version, or nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from kvrdma.store import Stores, StoreServer
from tests.helpers.stores import cma, until

torch = pytest.importorskip("torch")

from kvrdma.agent.states import PAGE_NBYTES, StatesPort, join_states, slice_states  # noqa: E402

pytestmark = [pytest.mark.needs("cma"), pytest.mark.needs("torch")]

PROMPT = b"p" * 32


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with StoreServer(64 * 16 * PAGE_NBYTES, cma()) as server:
        yield server


@pytest.fixture
def ports(store: StoreServer) -> Iterator[list[StatesPort]]:
    with ExitStack() as stack:
        stores = [stack.enter_context(Stores([str(store.endpoint)], cma())) for _ in range(2)]
        yield [
            stack.enter_context(closing(StatesPort(each, cma(), 1 << 20, f"states-{number}")))
            for number, each in enumerate(stores)
        ]


def version(value: float, dtype: str = "float32", columns: int = 40000) -> bytes:
    """Four rows of one value."""
    return slice_states(torch.full((4, columns), value, dtype=getattr(torch, dtype)), [(0, 4)])[0]


def pages(store: StoreServer) -> list[bytes]:
    """The names of what the store has."""
    return [key for stock in store._shelf.stocks() for key in stock.index._visible]


def give_up(store: StoreServer, keys: list[bytes]) -> None:
    """Let the store forget pages, as it does when it needs room."""
    until(lambda: not store.stats()["held"] and not store.stats()["filling"], store.stats)
    with store._shelf._lock:
        for stock in store._shelf.stocks():
            for key in keys:
                entry = stock.index._entries.get(key)
                if entry is not None:
                    stock.index._drop(entry)


def test_a_version_is_never_continued_by_another(store: StoreServer, ports: list[StatesPort]) -> None:
    one, two = version(1.0), version(2.0)
    assert ports[0].put([(PROMPT, one)], 10.0) == [True]
    assert len(pages(store)) == 10
    assert ports[1].get(PROMPT, 10.0) == one
    give_up(store, pages(store)[5:])
    assert ports[1].get(PROMPT, 10.0) is None
    assert ports[1].put([(PROMPT, two)], 10.0) == [True]
    assert ports[0].get(PROMPT, 10.0) == two  # and what is left of the first does not stand in its way
    assert ports[0].put([(PROMPT, one)], 10.0) == [True]
    assert set(join_states([ports[0].get(PROMPT, 10.0) or b""], "cpu").unique().tolist()) in ({1.0}, {2.0})


def test_of_two_versions_the_first_is_kept(store: StoreServer, ports: list[StatesPort]) -> None:
    one = version(1.0)
    assert ports[0].put([(PROMPT, one)], 10.0) == [True]
    assert ports[1].put([(PROMPT, version(2.0))], 10.0) == [True]
    assert len(pages(store)) == 10
    assert ports[1].get(PROMPT, 10.0) == one


def test_senders_of_equal_bits_share(store: StoreServer, ports: list[StatesPort]) -> None:
    assert ports[0].put([(PROMPT, version(1.0))], 10.0) == [True]
    assert ports[1].put([(b"q" * 32, version(1.0))], 10.0) == [True]
    assert len(pages(store)) == 10 + 1  # a head each
    assert ports[1].get(b"q" * 32, 10.0) == version(1.0)


def test_what_does_not_fit_is_not_offered(store: StoreServer, ports: list[StatesPort]) -> None:
    assert ports[0].put([(PROMPT, version(1.0, columns=80000))], 10.0) == [False]
    assert pages(store) == []


@pytest.mark.parametrize("seed", range(3))
def test_any_page_may_go_at_any_time(store: StoreServer, ports: list[StatesPort], seed: int) -> None:
    rng = random.Random(seed)
    versions = [
        version(1.0), version(2.0), version(2.0, "float16"), version(2.0, columns=100), version(3.0, "int8"),
        version(3.0, "float64", 20000), version(4.0, columns=20000), version(5.0, columns=0),
    ]  # fmt: skip
    found = {True: 0, False: 0}
    for _ in range(60):
        sender, receiver = rng.sample(ports, 2)
        sender.put([(PROMPT, each) for each in rng.sample(versions, rng.randint(1, 2))], 10.0)
        if rng.random() < 0.7:
            there = pages(store)
            give_up(store, rng.sample(there, rng.randint(0, len(there))))
        got = receiver.get(PROMPT, 10.0)
        assert got is None or got in versions
        found[got is None] += 1
    assert min(found.values()) > 5
