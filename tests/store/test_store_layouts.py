"""Every kind of cache goes through the store unchanged, also into another layout of the same content."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrdma.engine import Engine, PullFailed, PullReleased
from kvrdma.errors import LayoutError, LeaseRevokedError, MessageError, TopologyError
from kvrdma.handshake import Identity
from kvrdma.page_format import LayerSpec
from kvrdma.store import Prompt, StorePort, Stores, StoreServer
from kvrdma.store.filling import read_reference
from kvrdma.store.geometry import (
    Family,
    StoredLayer,
    decode_family,
    encode_family,
    family_of,
    fingerprint,
    record_nbytes,
)
from kvrdma.store.shelf import Shelf
from kvrdma.topology import EngineShape
from kvrdma.wire import StoreLookup, StoreOffer
from tests.helpers.stores import cma, until

pytestmark = pytest.mark.needs("cma")

B, H, N, C = 12, 2, 4, 16
TOKENS = 14
THERE, HERE = [3, 1, 7, 0], [5, 11, 2, 9]
Array = np.ndarray[Any, Any]


def attention(kind: str, item: str) -> tuple[Any, LayerSpec]:
    """Caches of one layer, and what they cannot say; keys and values have 16 elements each."""
    sizes = {"B": B, "H": H, "N": N, "C": 2 * C if "2" not in kind and kind != "pair" else C, "2": 2}
    dims = "BHNC" if kind == "pair" else kind
    spec = LayerSpec((0, H), H, N, dims=dims)
    shape = [sizes[dim] for dim in dims]
    if kind == "pair":
        return (np.zeros(shape, item), np.zeros(shape, item)), spec
    return np.zeros(shape, item), spec


def content(kind: str, cache: Any, block: int) -> Array:  # noqa: ANN401 - an array or two
    """Of a block, `[heads, tokens, keys and values]`, whatever the layout."""
    if kind == "pair":
        return np.concatenate([cache[0][block], cache[1][block]], -1)
    whole = np.moveaxis(cache, kind.index("B"), 0)[block]
    rest = kind.replace("B", "")
    order = [rest.index(dim) for dim in ("2HNC" if "2" in rest else "HNC")]
    whole = whole.transpose(order)
    return np.concatenate([whole[0], whole[1]], -1) if "2" in rest else whole


def flat(cache: Any) -> list[Array]:  # noqa: ANN401
    return list(cache) if isinstance(cache, tuple) else [cache]


class User:
    """An engine of one layer with a port to a store."""

    def __init__(self, store: StoreServer, caches: Mapping[str, Any], spec: LayerSpec, *, mla: bool = False) -> None:
        shape = EngineShape(1, H, is_mla=mla)
        self.engine = Engine(caches, spec, Identity(f"user {id(self)}", shape, model={"m": "x"}), cma())
        self.stores = Stores([str(store.endpoint)], cma())
        self.port = StorePort(self.engine, self.stores, N)

    def close(self) -> None:
        self.engine.close()
        self.stores.close()


@pytest.fixture
def store() -> Iterator[StoreServer]:
    with StoreServer(1 << 20, cma()) as server:
        yield server


def through(store: StoreServer, one: User, two: User) -> None:
    keys = one.port.keys(list(range(TOKENS)))
    assert one.port.put([Prompt(keys, THERE)], 10.0) == [True]
    assert two.port.keys(list(range(TOKENS))) == keys
    assert two.port.get([Prompt(keys, HERE)], 10.0) == [TOKENS]
    one.close()
    two.close()


KINDS = ["BHNC", "BNHC", "2BHNC", "B2NHC", "pair"]


@pytest.mark.parametrize("receiver", KINDS)
@pytest.mark.parametrize("sender", KINDS)
def test_attention(store: StoreServer, sender: str, receiver: str) -> None:
    mine, spec = attention(sender, "uint16")
    yours, other = attention(receiver, "uint16")
    rng = np.random.default_rng(1)
    for array in flat(mine):
        array[:] = rng.integers(1, 1 << 16, array.shape)
    through(store, User(store, {"l": mine}, spec), User(store, {"l": yours}, other))
    for number, (there, here) in enumerate(zip(THERE, HERE, strict=True)):
        count = min(N, TOKENS - number * N)
        assert np.array_equal(content(receiver, yours, here)[:, :count], content(sender, mine, there)[:, :count])
        assert not content(receiver, yours, here)[:, count:].any()
    for block in set(range(B)) - set(HERE):
        assert not content(receiver, yours, block).any()


@pytest.mark.parametrize("item", ["uint8", "float16", "float32", "float64"])
def test_mla_of_every_element(store: StoreServer, item: str) -> None:
    mine = np.arange(B * N * 24).reshape(B, N, 24).astype(item)
    yours = np.zeros_like(mine)
    spec = LayerSpec((0, 1), 1, N, kind="mla", dims="BNC")
    through(store, User(store, {"l": mine}, spec, mla=True), User(store, {"l": yours}, spec, mla=True))
    assert np.array_equal(yours[HERE].reshape(-1, 24)[:TOKENS], mine[THERE].reshape(-1, 24)[:TOKENS])


def test_pages_with_transposed_keys(store: StoreServer) -> None:
    mine = np.random.default_rng(2).standard_normal((B, H, N, 2 * C)).astype(np.float32)
    yours = np.zeros_like(mine)
    spec = LayerSpec((0, H), H, N, kind="cpu", dims="BHNC")
    through(store, User(store, {"l": mine}, spec), User(store, {"l": yours}, spec))
    assert np.array_equal(yours[HERE[:3]], mine[THERE[:3]])
    keys = [cache[block].reshape(H, -1)[:, : C * N].reshape(H, C, N) for cache, block in ((mine, 0), (yours, 9))]
    assert np.array_equal(keys[0][..., :2], keys[1][..., :2])


def test_states_of_a_recurrent_layer_are_refused(store: StoreServer) -> None:
    spec = LayerSpec((0, 1), 1, 1, kind="state")
    engine = Engine({"l": np.zeros((4, 64), np.uint8)}, spec, Identity("s", EngineShape(1, 1)), cma())
    stores = Stores([str(store.endpoint)], cma())
    with pytest.raises(LayoutError, match=r"layer l .*only layers with full attention"):
        StorePort(engine, stores, 4)
    stores.close()
    engine.close()


# What is said of a cache

LAYER = StoredLayer("l", "attention", "HN", True, 32, 2, "bfloat16")
FAMILY = Family({"m": "x"}, 4, 2, 4, False, (LAYER,))


def test_the_fingerprint_is_blind_to_the_split_and_sees_everything_else() -> None:
    same = [
        msgspec.structs.replace(FAMILY, ranks=1),
        msgspec.structs.replace(FAMILY, layers=(msgspec.structs.replace(LAYER, order="NH"),)),
    ]
    assert {fingerprint(each) for each in same} == {fingerprint(FAMILY)}
    others = [
        msgspec.structs.replace(FAMILY, model={"m": "y"}),
        msgspec.structs.replace(FAMILY, block_tokens=8),
        msgspec.structs.replace(FAMILY, kv_heads=2),
        msgspec.structs.replace(FAMILY, is_mla=True, ranks=1),
        *(
            msgspec.structs.replace(FAMILY, layers=(msgspec.structs.replace(LAYER, **change),))
            for change in ({"name": "k"}, {"elems": 16}, {"itemsize": 4}, {"dtype": "float16"}, {"split": False})
        ),
    ]
    assert len({fingerprint(each) for each in [FAMILY, *others]}) == 1 + len(others)


def test_records_hold_every_rank_and_layer() -> None:
    assert record_nbytes(FAMILY) == 4 * 4 * 32 * 2
    assert record_nbytes(msgspec.structs.replace(FAMILY, ranks=1)) == 4 * 4 * 32 * 2
    odd = msgspec.structs.replace(FAMILY, layers=(msgspec.structs.replace(LAYER, elems=6, itemsize=1),))
    assert record_nbytes(odd) == 2 * 64  # 2 heads of 4 tokens of 6 bytes, rounded up, for each rank


@pytest.mark.parametrize(
    ("family", "error"),
    [
        (msgspec.structs.replace(FAMILY, layers=(LAYER, LAYER)), MessageError),
        (msgspec.structs.replace(FAMILY, layers=()), MessageError),
        (msgspec.structs.replace(FAMILY, ranks=65), MessageError),
        (msgspec.structs.replace(FAMILY, ranks=3), TopologyError),
        (msgspec.structs.replace(FAMILY, layers=(msgspec.structs.replace(LAYER, elems=5),)), MessageError),
        (
            msgspec.structs.replace(FAMILY, layers=(msgspec.structs.replace(LAYER, kind="cpu", order="NH"),)),
            MessageError,
        ),
        (msgspec.structs.replace(FAMILY, layers=(msgspec.structs.replace(LAYER, kind="state"),)), MessageError),
    ],
)
def test_descriptions_from_elsewhere_are_checked(family: Family, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_family(encode_family(family))
    assert decode_family(encode_family(FAMILY)) == FAMILY


# What may still be written is neither served nor used again


def test_a_quarantined_filling_keeps_its_room_until_it_is_released() -> None:
    shelf = Shelf(1 << 16, 1, cma())
    mine, spec = attention("BHNC", "uint16")
    engine = Engine({"l": mine}, spec, Identity("e", EngineShape(1, H), model={"m": "x"}), cma())
    family = family_of(engine.layout, engine.identity, N)
    stock = shelf.open_stock(encode_family(family))
    keys = bytes(range(32)) + bytes(range(1, 33))
    offer = StoreOffer(encode_family(family), 0, keys, 2 * N, b"", 1.0)
    lookup = StoreLookup(fingerprint(family), keys, 2 * N)
    try:
        assert shelf.reserve("fill", stock, offer) is not None
        reason = LeaseRevokedError("for this test")
        shelf._follow(PullFailed("fill", reason, 1, quarantined=True))
        assert shelf.sizes()["filling"] == 1
        assert shelf.lookup(lookup).blocks == 0
        assert stock.index.busy
        shelf._follow(PullReleased("fill"))
        assert shelf.sizes()["filling"] == shelf.sizes()["used_bytes"] == 0
        assert shelf.reserve("again", stock, offer) is not None
        shelf.filled("again", succeeded=True)
        assert shelf.lookup(replace_hold(lookup)).blocks == 2
        other = msgspec.structs.replace(offer, keys=bytes(range(2, 34)) + bytes(range(3, 35)))
        assert shelf.reserve("at the end", stock, other) is not None
        assert shelf.sizes()["filling"] == 1
    finally:
        shelf.close()
        engine.close()
    assert shelf.sizes()["filling"] == 0


def replace_hold(lookup: StoreLookup) -> StoreLookup:
    return msgspec.structs.replace(lookup, hold=False)


def test_a_lease_that_runs_out_under_a_reader_is_a_miss_for_him() -> None:
    with StoreServer(1 << 20, replace(cma(), lease_s=0.2)) as store:
        mine, spec = attention("BHNC", "uint16")
        mine[:] = 7
        yours, _ = attention("BHNC", "uint16")
        one, two = User(store, {"l": mine}, spec), User(store, {"l": yours}, spec)
        keys = one.port.keys(list(range(TOKENS)))
        one.port.put([Prompt(keys, THERE)], 10.0)
        found = two.port._find(keys, time.monotonic() + 10, hold=True)
        assert found is not None
        until(lambda: store.stats()["held"] == 0, store.stats)
        two.engine.pull("late", read_reference(found[1].reference), HERE, timeout_s=10.0)
        (event,) = two.engine.wait(20.0)
        assert isinstance(event, PullFailed)
        assert isinstance(event.reason, LeaseRevokedError)
        assert two.port.get([Prompt(keys, HERE)], 10.0) == [TOKENS]
        one.close()
        two.close()
