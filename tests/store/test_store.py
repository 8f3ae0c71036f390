"""The store and its users: what goes in comes out, whole and right, whoever asks."""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from kvrdma.errors import ConfigError, KVRDMAError, MessageError, PlanError, TransportUnavailableError
from kvrdma.sidechannel import Endpoint, SideChannelClient
from kvrdma.store import Prompt, Stores, StoreServer
from kvrdma.store.numbers import DESCRIPTIONS, Exporter
from kvrdma.wire import (
    AskStore,
    CloseLink,
    StoreFound,
    StoreLookup,
    StoreNumbers,
    StoreOffer,
    StoreOffered,
    StoreRelease,
)
from tests.helpers.stores import MODEL, RECORD, Client, cma, tokens_of, until
from tests.helpers.tagged import Model, busy

pytestmark = pytest.mark.needs("cma")

BLOCKS = [3, 1, 4, 0, 5, 9, 2, 6]


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with StoreServer(64 * RECORD, cma()) as server:
        yield server
        until(lambda: not server.stats()["held"] and not server.stats()["filling"], server.stats)


def at(store: StoreServer) -> list[str]:
    return [str(store.endpoint)]


@pytest.mark.parametrize("count", [1, 3, 4, 5, 29, 32])
def test_what_goes_in_comes_out_after_its_sender_has_gone(store: StoreServer, count: int) -> None:
    with Client(at(store)) as sender:
        assert sender.put(1, count, BLOCKS)
    with Client(at(store)) as reader:
        assert reader.get(1, count, [20, 11, 30, 13, 14, 15, 16, 17]) == count
        assert reader.get(2, count, BLOCKS) == 0
        assert busy(reader.ranks[0].engine) == {}


def test_a_shared_beginning_is_found_and_stored_once(store: StoreServer) -> None:
    with Client(at(store)) as one, Client(at(store)) as two:
        one.put(1, 14, BLOCKS[:4])
        longer = [*tokens_of(1, 14), 7, 7, 7]
        keys = two.port.keys(longer)
        two.cache.poison()
        assert two.port.get([Prompt(keys, BLOCKS)], 10.0) == [12]  # whole blocks only
        assert two.cache.wrong(1, BLOCKS, range(12)) == []
        filled = store.stats()["filled"]
        assert filled == 4
        two.cache.write(1, BLOCKS, range(17))
        assert two.port.put([Prompt(keys, BLOCKS)], 10.0) == [True]
        assert store.stats()["filled"] == filled + 2  # the fourth block, whole now, and the fifth
        assert two.port.put([Prompt(keys, BLOCKS)], 10.0) == [True]
        assert store.stats()["filled"] == filled + 2
        assert one.port.look([keys, one.port.keys(longer[:3])], 5.0) == [17, 0]


def test_a_salt_keeps_tenants_apart(store: StoreServer) -> None:
    with Client(at(store)) as one:
        one.cache.write(1, BLOCKS, range(8))
        mine = one.port.keys(tokens_of(1, 8), b"tenant a")
        assert one.port.put([Prompt(mine, BLOCKS)], 10.0) == [True]
        assert one.port.look([mine, one.port.keys(tokens_of(1, 8)), one.port.keys(tokens_of(1, 8), b"b")], 5) == [
            8,
            0,
            0,
        ]


def test_tokens_in_place_are_not_fetched_again(store: StoreServer) -> None:
    with Client(at(store)) as one, Client(at(store)) as two:
        one.put(1, 16, BLOCKS)
        prompt = replace(two.prompt(1, 16, BLOCKS), start=8)
        two.cache.poison()
        two.cache.write(1, BLOCKS, range(8), generation=9)
        assert two.port.get([prompt], 10.0) == [16]
        assert two.cache.wrong_rows(1, BLOCKS, range(8), generation=9) == 0
        assert two.cache.wrong_rows(1, BLOCKS[2:], range(8)) == 8 * 4 * 2  # tokens 8 to 16 lie there instead
        assert two.port.get([replace(prompt, start=16)], 10.0) == [16]
        assert two.port.get([replace(two.prompt(5, 16, BLOCKS), start=8)], 10.0) == [8]


def test_fewer_blocks_than_the_prompt_has(store: StoreServer) -> None:
    with Client(at(store)) as one:
        one.put(1, 30, BLOCKS)
        one.cache.poison()
        assert one.port.get([one.prompt(1, 30, [20, 21])], 10.0) == [8]
        assert one.cache.wrong(1, [20, 21], range(8)) == []


SPLITS = [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (4, 2), (8, 4), (4, 8)]


@pytest.mark.parametrize(("sender_tp", "reader_tp"), SPLITS)
def test_splits_over_ranks_may_differ(store: StoreServer, sender_tp: int, reader_tp: int) -> None:
    with (
        Client(at(store), MODEL.split(tp_size=sender_tp)) as one,
        Client(at(store), MODEL.split(tp_size=reader_tp)) as two,
    ):
        assert one.put(1, 29, BLOCKS)
        assert two.get(1, 29, BLOCKS[::-1]) == 29
        until(lambda: not store.stats()["held"], store.stats, timeout_s=5)  # well before the leases run out


def test_blocks_are_seen_once_every_rank_has_brought_its_share(store: StoreServer) -> None:
    with Client(at(store), MODEL.split(tp_size=2)) as one, Client(at(store)) as two:
        one.ranks[0].cache.write(1, BLOCKS, range(8))
        assert one.ports[0].put([one.prompt(1, 8, BLOCKS)], 10.0) == [True]
        assert two.get(1, 8, BLOCKS) == 0
        one.ranks[1].cache.write(1, BLOCKS, range(8))
        assert one.ports[1].put([one.prompt(1, 8, BLOCKS, 1)], 10.0) == [True]
        assert two.get(1, 8, BLOCKS) == 8


@pytest.mark.parametrize(("sender_block", "reader_block", "stored"), [(4, 8, 4), (8, 4, 4), (4, 8, 8), (2, 8, 4)])
def test_block_sizes_may_differ(store: StoreServer, sender_block: int, reader_block: int, stored: int) -> None:
    sender, reader = replace(MODEL, block=sender_block), replace(MODEL, block=reader_block)
    with Client(at(store), sender, block_tokens=stored) as one, Client(at(store), reader, block_tokens=stored) as two:
        assert one.put(1, 13, BLOCKS)
        assert two.get(1, 13, BLOCKS[::-1]) == 13


def test_models_and_block_sizes_do_not_mix(store: StoreServer) -> None:
    others = [replace(MODEL, heads=2, shape=Model(heads=2).split(tp_size=1).shape), replace(MODEL, layers=3)]
    with Client(at(store)) as one, Client(at(store), others[0]) as two, Client(at(store), others[1]) as three:
        one.put(1, 16, BLOCKS)
        assert two.get(1, 16, BLOCKS) == 0
        assert three.get(1, 16, BLOCKS) == 0
        two.put(1, 16, BLOCKS)
        three.put(1, 16, BLOCKS)
        assert [client.get(1, 16, BLOCKS) for client in (one, two, three)] == [16, 16, 16]
        assert store.stats()["families"] == 3


def test_the_family_used_longest_ago_makes_way() -> None:
    models = [replace(MODEL, layers=layers) for layers in (1, 2, 3)]
    with StoreServer(256 * RECORD, cma(), max_families=2) as store:
        clients = [Client(at(store), model) for model in models]
        for number, client in enumerate(clients):
            assert client.put(number, 8, BLOCKS)
        assert [client.get(number, 8, BLOCKS) for number, client in enumerate(clients)] == [0, 8, 8]
        assert store.stats()["families"] == 2
        for client in clients:
            client.close()


def test_the_oldest_goes_when_the_store_is_full(store: StoreServer) -> None:
    with Client(at(store)) as one:
        for number in range(10):  # 80 blocks into room for 64
            assert one.put(number, 32, BLOCKS)
            assert one.get(number, 32, BLOCKS) == 32
        got = [one.get(number, 32, BLOCKS) for number in range(10)]
        assert got == [0, 0, *[32] * 8]
        assert store.stats()["evicted"] >= 16
        assert store.stats()["used_bytes"] <= store.stats()["capacity_bytes"] == 64 * RECORD


def test_what_a_reader_holds_or_held_was_used_later_than_what_was_put_after_it(store: StoreServer) -> None:
    with Client(at(store)) as one, SideChannelClient(store.endpoint) as raw:

        def blocks_of(number: int, *, hold: bool = False) -> StoreFound:
            keys = one.port.keys(tokens_of(number, 32))
            reply = raw.request(StoreLookup(one.port.fingerprint, keys.joined(), 32, hold), 5.0)
            assert isinstance(reply, StoreFound)
            return reply

        for number in range(8):
            assert one.put(number, 32, BLOCKS)
        held = blocks_of(0, hold=True)
        assert one.put(8, 32, BLOCKS)  # while it is held: in the place of the next one
        (stock,) = store._shelf.stocks()
        assert next(iter(stock.index._entries.values())).idle, "who makes room has to pass what is held each time"
        raw.request(StoreRelease(held.lease), 5.0)
        raw.request(StoreRelease(blocks_of(2, hold=True).lease), 5.0)
        assert one.put(9, 32, BLOCKS)  # afterwards
        assert [blocks_of(number).blocks for number in range(10)] == [8, 0, 8, 0, 8, 8, 8, 8, 8, 8]


def test_a_store_full_of_blocks_being_read_only_costs_misses(store: StoreServer) -> None:
    with Client(at(store)) as one, SideChannelClient(store.endpoint) as raw:
        for number in range(8):
            one.put(number, 32, BLOCKS)
        held = []
        for number in range(8):
            keys = one.port.keys(tokens_of(number, 32))
            reply = raw.request(StoreLookup(one.port.fingerprint, keys.joined(), 32), 5.0)
            assert isinstance(reply, StoreFound)
            held.append(reply)
        assert [each.blocks for each in held] == [8] * 8
        one.put(99, 32, BLOCKS)
        assert one.get(99, 32, BLOCKS) == 0
        assert one.get(0, 32, BLOCKS) == 32
        for each in held:
            raw.request(StoreRelease(each.lease), 5.0)
        until(lambda: not store.stats()["held"], store.stats)
        assert one.put(99, 32, BLOCKS)
        assert one.get(99, 32, BLOCKS) == 32


def test_readers_and_writers_at_once_see_whole_blocks_only() -> None:
    """A store far too small for what is put into it, with leases that run out under the readers."""
    config = cma(lease_s=0.05)
    failures: list[BaseException] = []
    seen = {"tokens": 0, "asked": 0}

    def work(seed: int, endpoints: list[str]) -> None:
        try:
            with Client(endpoints) as client:
                rng = random.Random(seed)
                for _ in range(60):
                    request = rng.randrange(12)
                    if rng.random() < 0.5:
                        client.put(request, 32, BLOCKS, 5.0)
                    else:
                        seen["asked"] += 32
                        seen["tokens"] += client.get(request, 32, BLOCKS, 5.0)
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
            failures.append(error)

    with StoreServer(48 * RECORD, config) as store:
        threads = [threading.Thread(target=work, args=(seed, at(store))) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failures, failures
        assert store.stats()["evicted"] > 100
        assert 0 < seen["tokens"] < seen["asked"]
        until(lambda: not store.stats()["held"] and not store.stats()["filling"], store.stats)


def test_several_stores_share_the_prompts() -> None:
    with StoreServer(64 * RECORD, cma()) as a, StoreServer(64 * RECORD, cma()) as b:
        with Client([*at(a), *at(b)]) as one, Client([*at(b), *at(a)]) as two:
            for number in range(12):
                assert one.put(number, 8, BLOCKS)
            assert [two.get(number, 8, BLOCKS) for number in range(12)] == [8] * 12
        blocks = a.stats()["blocks"], b.stats()["blocks"]
        assert sum(blocks) == 24
        assert min(blocks) > 0


def test_with_two_replicas_losing_a_store_loses_nothing() -> None:
    with (
        StoreServer(64 * RECORD, cma()) as a,
        StoreServer(64 * RECORD, cma()) as b,
        Client([*at(a), *at(b)], replicas=2) as one,
        Client([*at(a), *at(b)], replicas=2) as two,
    ):
        for number in range(6):

            def both_have_it(number: int = number) -> bool:  # a busy store may be left out: offered again, it fills
                assert one.put(number, 8, BLOCKS)
                return a.stats()["blocks"] == b.stats()["blocks"] == 2 * (number + 1)

            until(both_have_it, lambda: (a.stats(), b.stats()))
        a.close()
        assert [two.get(number, 8, BLOCKS) for number in range(6)] == [8] * 6


# Strange users


def test_malformed_messages_are_answered_and_change_nothing(store: StoreServer) -> None:
    with Client(at(store)) as one, SideChannelClient(store.endpoint) as raw:
        one.put(1, 8, BLOCKS)
        family, keys = one.port._family, one.port.keys(tokens_of(2, 8)).joined()
        reference = b"\xc1"
        bad: list[StoreOffer | StoreLookup] = [
            StoreOffer(family, 0, keys, 9, reference, 1.0),
            StoreOffer(family, 1, keys, 8, reference, 1.0),
            StoreOffer(family, 0, keys[:-1], 8, reference, 1.0),
            StoreLookup(one.port.fingerprint, keys[:-1], 8),
        ]
        for message in bad:
            with pytest.raises(PlanError):
                raw.request(message, 5.0)
        with pytest.raises(MessageError, match="a store listens here, and does not answer link tests"):
            raw.request(CloseLink(0), 5.0)
        declined = store.stats()["declined"]
        for text in (b"", b"\xc1", b"\x80", b"\x93\x01\x02\x03"):  # found out by the thread that fills
            assert isinstance(raw.request(StoreOffer(text, 0, keys, 8, reference, 1.0), 5.0), StoreOffered)
        assert isinstance(raw.request(StoreOffer(family, 0, keys, 8, reference, 1.0), 5.0), StoreOffered)
        until(lambda: store.stats()["declined"] == declined + 5, store.stats)
        assert one.get(1, 8, BLOCKS) == 8
        assert one.get(2, 8, BLOCKS) == 0


def test_an_offer_that_leads_nowhere_leaves_nothing_behind(store: StoreServer) -> None:
    with Client(at(store)) as one, SideChannelClient(store.endpoint) as raw:
        one.put(1, 8, BLOCKS)
        keys = one.port.keys(tokens_of(2, 8)).joined()
        reference = one.ranks[0].engine.publish("gone", BLOCKS[:2], 8)
        one.ranks[0].engine.withdraw("gone")
        offer = StoreOffer(one.port._family, 0, keys, 8, msgspec.msgpack.encode(reference.to_params()), 5.0)
        raw.request(offer, 5.0)
        until(lambda: store.stats()["fills_failed"] == 1, store.stats)
        assert store.stats()["used_bytes"] == 2 * RECORD
        assert one.get(2, 8, BLOCKS) == 0


def test_numbers_by_message_and_over_http(store: StoreServer) -> None:
    exporter = Exporter(store, Endpoint("127.0.0.1", 0))
    with Client(at(store)) as one, SideChannelClient(store.endpoint) as raw:
        one.put(1, 8, BLOCKS)
        one.get(1, 8, BLOCKS)
        reply = raw.request(AskStore(), 5.0)
        assert isinstance(reply, StoreNumbers)
        assert reply.numbers["filled"] == reply.numbers["hits"] == 2
        assert set(DESCRIPTIONS) <= set(reply.numbers)
        with urllib.request.urlopen(f"http://{exporter.endpoint}/metrics", timeout=5) as page:
            text = page.read().decode()
        assert "kvrdma_store_hits_total 2.0" in text
        assert f"kvrdma_store_capacity_bytes {64.0 * RECORD}" in text
    exporter.close()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (lambda: StoreServer(100, cma()), "needs 65536 bytes"),
        (lambda: StoreServer(1 << 60, cma()), "does not fit into memory"),
        (lambda: StoreServer(1 << 20, cma(bind="0.0.0.0:0", insecure=True)), "--advertise"),
        (
            lambda: Exporter(SimpleNamespace(stats=dict), Endpoint("a..b", 0)),
            r"metrics cannot be served at a..b:0: .*idna",
        ),
        (lambda: Stores([]), "got none"),
        (lambda: Stores(["a:1", "a:1"]), "each once"),
        (lambda: Stores(["a"]), "HOST:PORT"),
        (lambda: Stores(["a:1"], replicas=2), "replicas=2 with 1 stores"),
    ],
)
def test_settings_that_cannot_work(what: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        what()  # type: ignore[operator]


def test_a_transport_that_does_not_work_is_told_at_the_start() -> None:
    with pytest.raises(TransportUnavailableError, match="'nope' is not installed"):
        StoreServer(1 << 20, replace(cma(), transports=("nope",)))


def test_blocks_too_large_for_the_store_are_misses() -> None:
    with StoreServer(1 << 16, cma()) as store, Client(at(store), replace(MODEL, layers=4)) as one:
        assert not one.put(1, 8, BLOCKS, timeout_s=1.0)  # waits: only the thread that fills finds out
        began_s = time.monotonic()
        assert not one.put(1, 8, BLOCKS, timeout_s=60.0)  # known by now
        assert time.monotonic() - began_s < 30
        assert one.get(1, 8, BLOCKS) == 0
        assert store.stats()["declined"] == 2
        assert store.alive


def test_caches_that_cannot_be_stored() -> None:
    with pytest.raises(KVRDMAError, match="KV group 1"):
        Client(["127.0.0.1:1"], replace(MODEL, groups=2))
    with pytest.raises(KVRDMAError, match="dcp"):
        Client(["127.0.0.1:1"], MODEL.split(tp_size=2, dcp_size=2))
