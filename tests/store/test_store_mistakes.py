"""Calls that raise, or are interrupted, give the caller's blocks back: nothing reads or writes there afterwards."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrdma.engine import Engine
from kvrdma.errors import ConfigError, LayoutError, PlanError
from kvrdma.reference import PullReference
from kvrdma.store import PrefixKeys, Prompt, StoreServer
from kvrdma.store.clients import StoreClient
from kvrdma.store.geometry import family_of
from kvrdma.wire import StoreOffer
from tests.helpers.stores import Client, cma, tokens_of

pytestmark = pytest.mark.needs("cma")


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with StoreServer(1 << 20, cma()) as server:
        yield server


@pytest.fixture
def client(store: StoreServer) -> Iterator[Client]:
    with Client([str(store.endpoint)]) as opened:
        yield opened


class InterruptError(BaseException):
    """As Ctrl-C."""


def idle(engine: Engine) -> bool:
    stats = engine.stats()
    return not (stats["leases"] or stats["pulls"] or stats["reads"])


@pytest.mark.parametrize("blocks", [[1, 9999], [1], [-1, 2]])
def test_one_prompt_that_cannot_be_offered_keeps_all_from_being_offered(
    store: StoreServer, client: Client, blocks: list[int]
) -> None:
    client.cache.write(1, [3, 4], range(8))
    with pytest.raises(PlanError, match="prompt 1"):
        client.port.put([client.prompt(1, 8, [3, 4]), client.prompt(2, 8, blocks)], 5)
    assert store.stats()["offers"] == 0
    assert idle(client.ranks[0].engine)
    assert client.put(1, 8, [3, 4])


def test_an_interrupted_offer_is_taken_back(
    store: StoreServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = StoreClient.ask

    def ask(self: StoreClient, message: Any, kind: Any, timeout_s: float) -> Any:  # noqa: ANN401
        if isinstance(message, StoreOffer) and message.keys == client.prompt(2, 8, [5, 6]).keys.joined():
            raise InterruptError
        return really(self, message, kind, timeout_s)

    monkeypatch.setattr(StoreClient, "ask", ask)
    with pytest.raises(InterruptError):
        client.port.put([client.prompt(1, 8, [3, 4]), client.prompt(2, 8, [5, 6])], 5)
    assert client.ranks[0].engine.stats()["leases"] == 0  # at once: nobody may read what is written there next


@pytest.mark.parametrize(
    "change",
    [
        *({"start": -1}, {"start": 1.5}, {"start": "0"}, {"start": 9}),
        *({"blocks": [5, 9999]}, {"blocks": [7, 7]}, {"blocks": None}, {"blocks": "78"}, {"blocks": [[7], [8]]}),
        *({"blocks": [7, True]}, {"keys": None}, {"keys": PrefixKeys((b"k" * 32,), 8, 8)}),
    ],
)
def test_one_prompt_that_cannot_be_fetched_keeps_all_from_being_fetched(client: Client, change: dict[str, Any]) -> None:
    assert client.put(1, 8, [3, 4])
    client.cache.poison()
    wrong = replace(client.prompt(1, 8, [7, 8]), **change)
    with pytest.raises(PlanError, match="prompt 1"):
        client.port.get([client.prompt(1, 8, [5, 6]), wrong], 5)
    assert client.ranks[0].engine.stats()["pulls_started"] == 0
    assert client.get(1, 8, [5, 6]) == 8


@pytest.mark.parametrize("blocks", [[7, 7], None, "78", [[7], [8]]])
def test_blocks_that_are_no_list_of_one_place_each_are_not_offered(client: Client, blocks: Any) -> None:  # noqa: ANN401
    with pytest.raises(PlanError, match="prompt 0"):
        client.port.put([client.prompt(1, 8, blocks)], 5)
    assert client.ranks[0].engine.stats()["leases"] == 0


def test_blocks_of_any_kind_of_list(client: Client) -> None:
    there: Any = np.array([3, 4], np.uint16)
    here: Any = np.array([5, 6])
    assert client.put(1, 8, there)
    assert client.get(1, 8, here) == 8
    assert client.get(1, 8, range(5, 7)) == 8
    start: Any = np.int64(4)
    assert client.port.get([replace(client.prompt(1, 8, [5, 6]), start=start)], 10) == [8]


def test_blocks_that_are_not_filled_may_be_any(client: Client) -> None:
    assert client.put(1, 12, [3, 4, 5])
    client.cache.poison()
    null_first = replace(client.prompt(1, 12, [0, 0, 7, 7]), start=8)  # in place already, and behind the prompt
    assert client.port.get([null_first], 10) == [12]
    assert client.port.get([client.prompt(1, 12, [8, 9])], 10) == [8]  # shorter than the prompt


@pytest.mark.parametrize("tokens", [0, -1, 1.5, None, True, "4", 1 << 20])
def test_store_blocks_of_no_size(store: StoreServer, tokens: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=f"block_tokens={tokens!r} is not a whole number from 1 to 65536"):
        Client([str(store.endpoint)], block_tokens=tokens)


def test_store_blocks_that_line_up_with_the_engines_too_rarely(store: StoreServer) -> None:
    with pytest.raises(ConfigError, match=r"line up only every 131068 tokens.*use a multiple of 4"):
        Client([str(store.endpoint)], block_tokens=32767)
    number: Any = np.int64(8)
    with Client([str(store.endpoint)], block_tokens=number) as client:
        assert client.put(1, 8, [3, 4])
        assert client.get(1, 8, [5, 6]) == 8


def test_caches_of_which_every_store_would_turn_away_the_description(client: Client) -> None:
    engine = client.ranks[0].engine
    many = msgspec.structs.replace(engine.layout, layers=(engine.layout.layers[0],) * 4097)
    with pytest.raises(LayoutError, match=r"a store cannot hold these caches: .*length <= 4096"):
        family_of(many, engine.identity, 4)


def test_an_interrupted_fetch_is_over_before_it_raises(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.put(1, 8, [3, 4])
    really = Engine.pull
    silent = socket.create_server(("127.0.0.1", 0))

    def pull(self: Engine, name: Hashable, reference: PullReference, *given: Any, **named: Any) -> None:  # noqa: ANN401
        nowhere = msgspec.structs.replace(reference, engine_id="silent", port=silent.getsockname()[1])
        really(self, name, nowhere, *given, **named)
        raise InterruptError

    with silent, monkeypatch.context() as patch:
        patch.setattr(Engine, "pull", pull)
        with pytest.raises(InterruptError):
            client.port.get([client.prompt(1, 8, [5, 6])], 5)
        assert client.ranks[0].engine.stats()["pulls_failed"] == 1
        assert idle(client.ranks[0].engine)
    assert client.get(1, 8, [5, 6]) == 8


@pytest.mark.parametrize("seconds", [1e6, float("inf")])
def test_any_time_may_be_given(client: Client, seconds: float) -> None:
    assert client.put(1, 8, [3, 4], seconds)
    assert client.get(1, 8, [5, 6], seconds) == 8
    assert client.port.look([client.prompt(1, 8, []).keys], seconds) == [8]


def test_times_that_are_none(client: Client) -> None:
    prompt = Prompt(client.port.keys(tokens_of(1, 8)), [3, 4])
    for call in (client.port.put, client.port.get):
        with pytest.raises(ConfigError, match="timeout_s=nan"):
            call([prompt], float("nan"))
    with pytest.raises(ConfigError, match="look_s='1'"):
        client.port.get([prompt], 1, look_s="1")  # type: ignore[arg-type]
    assert client.port.get([prompt], -1) == [0]
    assert client.port.put([prompt], -1) == [False]
