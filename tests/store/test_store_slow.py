"""A store that answers, but later than anybody waits: a miss, never another request's answer, nothing held for good."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvrdma.store import StoreServer
from kvrdma.wire import Message, StoreLookup, StoreOffer
from tests.helpers.stores import Client, cma, until

pytestmark = pytest.mark.needs("cma")

SOON_S = 0.2


class SlowStore(StoreServer):
    """Does what it is asked at once, and says so when ``gate`` is open."""

    def __init__(self, slow: type[Message]) -> None:
        self.slow = slow
        self.asked = 0
        self.gate = threading.Event()
        self.gate.set()
        super().__init__(1 << 20, cma(lease_s=1.0))

    def _answer(self, message: Message) -> Message:
        answer = super()._answer(message)
        if isinstance(message, self.slow):
            self.asked += 1
            self.gate.wait()
        return answer


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[SlowStore]:
    with SlowStore(request.param) as server:
        try:
            yield server
        finally:
            server.gate.set()


def at(store: StoreServer) -> list[str]:
    return [str(store.endpoint)]


def nothing_held(store: StoreServer) -> None:
    until(lambda: not store.stats()["held"] and not store.stats()["filling"], store.stats)


@pytest.mark.parametrize("store", [StoreLookup], indirect=True)
def test_an_answer_that_comes_late_is_a_miss_and_not_the_answer_to_the_next_question(store: SlowStore) -> None:
    with Client(at(store)) as client:
        assert client.put(1, 8, [1, 2])
        assert client.put(2, 12, [3, 4, 5])
        until(lambda: store.stats()["blocks"] == 5, store.stats)
        store.gate.clear()
        assert client.get(1, 8, [6, 7], SOON_S) == 0
        assert store.stats()["held"] == 1
        store.gate.set()
        assert client.get(2, 12, [6, 7, 8]) == 12  # every byte is looked at
        assert client.get(1, 8, [6, 7]) == 8
        nothing_held(store)


@pytest.mark.parametrize("store", [StoreLookup], indirect=True)
def test_a_store_that_is_always_late_is_left_alone_and_asked_again_later(store: SlowStore) -> None:
    with Client(at(store)) as client:
        assert client.put(1, 8, [1, 2])
        store.gate.clear()
        for _ in range(8):
            assert client.get(1, 8, [6, 7], SOON_S / 4) == 0
        store.gate.set()
        until(lambda: client.get(1, 8, [6, 7]) == 8, store.stats)
        nothing_held(store)


@pytest.mark.parametrize("store", [StoreOffer], indirect=True)
def test_an_offer_that_is_answered_late_is_taken_back_and_what_is_written_then_is_never_served(
    store: SlowStore,
) -> None:
    with Client(at(store)) as client:
        store.gate.clear()
        assert not client.put(1, 8, [1, 2], SOON_S)
        client.cache.write(9, [1, 2], range(8))  # the blocks are the caller's again
        store.gate.set()
        nothing_held(store)
        assert client.get(1, 8, [6, 7]) in {0, 8}  # every byte that came is looked at
        assert client.put(2, 8, [3, 4])
        assert client.get(2, 8, [6, 7]) == 8
        assert client.ranks[0].engine.stats()["leases"] == 0


@pytest.mark.parametrize("store", [StoreLookup], indirect=True)
def test_a_slow_store_beside_another(store: SlowStore) -> None:
    with StoreServer(1 << 20, cma()) as other, Client([*at(store), *at(other)], replicas=2) as client:
        assert client.put(1, 8, [1, 2])
        store.gate.clear()
        assert client.get(1, 8, [6, 7], 3.0) == 8
