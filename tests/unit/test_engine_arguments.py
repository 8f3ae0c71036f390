"""Mistakes in what a caller hands over are told at the call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvrdma
from kvrdma import Config, Engine, EngineShape, Identity, LayerSpec
from kvrdma.engine import PullDone, PullFailed
from kvrdma.errors import (
    ConfigError,
    LayoutError,
    LeaseError,
    MessageError,
    PlanError,
    PullTimeoutError,
    TopologyError,
)
from kvrdma.lease import LeaseKey
from kvrdma.plan import TokenRange
from kvrdma.reference import PullReference
from kvrdma.topology import RankId

SPEC = LayerSpec(heads=(0, 2), total_heads=2, block_size=16)
WHO = Identity("engine", EngineShape(tp_size=1, num_kv_heads=2))


def cache() -> np.ndarray[Any, np.dtype[np.float16]]:
    return np.zeros((8, 2, 16, 32), np.float16)


def open_engine(caches: object, specs: object = SPEC) -> Engine:
    return Engine(caches, specs, WHO, Config(transports=("cma",)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("caches", "specs", "message"),
    [
        ([], SPEC, "caches must map layer names to tensors, at least one; got list"),
        ({}, SPEC, "got dict"),
        ({"a": np.zeros((8, 2, 16, 32))}, None, "specs must be a LayerSpec.*got NoneType"),
    ],
)
def test_arguments_of_another_kind(caches: object, specs: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        open_engine(caches, specs)


def test_read_only_cache() -> None:
    array = cache()
    array.setflags(write=False)
    with pytest.raises(LayoutError, match="layer b is read-only"):
        open_engine({"a": cache(), "b": array})


@pytest.mark.parametrize(
    ("blocks", "tokens", "message"),
    [
        ([8], 16, "block 8 of group 0 is not one of 8 blocks"),
        ([0, -1], 32, "block -1 of group 0"),
        ([0], -1, "num_tokens -1"),
    ],
)
def test_publications_of_blocks_that_are_not_there(blocks: list[int], tokens: int, message: str) -> None:
    with open_engine({"a": cache()}) as engine:
        with pytest.raises(PlanError, match=message):
            engine.publish("r", blocks, tokens)
        assert engine.stats()["leases"] == 0
        engine.publish("r", [7, 0], 32)


def test_a_block_has_one_place_among_the_published_positions() -> None:
    with open_engine({"a": cache()}) as engine:
        with pytest.raises(PlanError, match=r"request 'r': block 3 of group 0 appears twice.*counted by first_blocks"):
            engine.publish("r", [5, 3, 4, 3], 49)
        engine.publish("r", [5, 3, 4, 3], 48)  # what is behind the last token is not read
        with pytest.raises(PlanError, match="block 0 of group 0 appears twice"):
            engine.publish("window", [0, 0, 0, 6, 7], 80)
        engine.publish("window", [6, 7], 80, first_blocks=[3])
        engine.publish("behind", [6, 7, 7], 80, first_blocks=[3])
        with pytest.raises(PlanError, match="block 7 of group 0 appears twice"):
            engine.publish("within", [6, 7, 7], 81, first_blocks=[3])
        assert engine.stats()["leases"] == 3


def test_groups_are_looked_at_one_by_one() -> None:
    caches = {"a": cache(), "b": np.zeros((8, 2, 4, 32), np.float16), "state": np.zeros((8, 64), np.uint8)}
    specs = {
        "a": SPEC,
        "b": replace(SPEC, block_size=4, group=1),
        "state": LayerSpec((0, 1), 1, 1, kind="state", group=2),
    }
    with open_engine(caches, specs) as engine:
        engine.publish("r", [[3], [3, 4, 5, 6, 6], [3]], 16)
        with pytest.raises(PlanError, match="block 6 of group 1 appears twice"):
            engine.publish("s", [[3, 2], [3, 4, 5, 6, 6], [3]], 17)
        with pytest.raises(PlanError, match="block 3 of group 2 appears twice"):
            engine.publish("s", [[3], [3, 4, 5, 6], [3, 3]], 16)


def test_the_package_offers_what_an_engine_needs() -> None:
    assert all(getattr(kvrdma, name) is not None for name in kvrdma.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = kvrdma.Engin


NAN = float("nan")
REF = PullReference("peer", 1, "127.0.0.1", 1, LeaseKey(0, 1), 32, ((1, 2),), (0,), "r")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda engine: engine.pull("r", REF, [3, 4], timeout_s=NAN), ConfigError),
        (lambda engine: engine.pull("r", REF, [3, 4], timeout_s="1"), ConfigError),
        (lambda engine: engine.pull([], REF, [3, 4]), TypeError),
        (lambda engine: engine.pull("r", REF, None), PlanError),
        (lambda engine: engine.pull("r", REF, [3, 4], tokens=(0, 4)), PlanError),
        (lambda engine: engine.pull("r", REF, [3, 4], tokens=TokenRange(0, 7.5)), PlanError),  # type: ignore[arg-type]
        (lambda engine: engine.pull("r", REF, [3, 4], tokens=[TokenRange(0, 16), TokenRange(16, 32)]), PlanError),
        (lambda engine: engine.pull("r", None, [3, 4]), MessageError),
        (lambda engine: engine.pull("r", [1], [3, 4]), MessageError),
        (lambda engine: engine.hold("r", REF, for_s=NAN), ConfigError),
        (lambda engine: engine.hold("r", REF, for_s="1"), ConfigError),
        (lambda engine: engine.hold([], REF), TypeError),
        (lambda engine: engine.decline("x"), MessageError),
        (lambda engine: engine.abort([]), TypeError),
        (lambda engine: engine.withdraw([]), TypeError),
        (lambda engine: engine.extend("r", NAN), ConfigError),
        (lambda engine: engine.wait(NAN), ConfigError),
        (lambda engine: engine.wait(True), ConfigError),
        (lambda engine: engine.publish("r", [1, 2], 7.5), PlanError),
        (lambda engine: engine.publish("r", [1, 2], "8"), PlanError),
        (lambda engine: engine.publish("r", [1, 2], 8, consumers=1.5), PlanError),
        (lambda engine: engine.publish("r", [1, 2], 8, first_blocks=[0.5]), PlanError),
        (lambda engine: engine.publish("r", [1, 2], 32, first_blocks=0), PlanError),
        (lambda engine: engine.publish("r", [1, 2], 32, first_blocks="0"), PlanError),
        (lambda engine: engine.publish("r", [1, 2], 32, first_blocks=[-1]), PlanError),
        (lambda engine: engine.publish("r", [1, 2], 32, first_blocks=[1 << 80]), PlanError),
        (lambda engine: engine.publish("r", [], 1 << 80), PlanError),
        (lambda engine: engine.publish("r", [[1]] * 257, 1), PlanError),
        (lambda engine: engine.publish("r", [1, 2], 32, consumers=1 << 80), LeaseError),
        (lambda engine: engine.publish("r", [1, 1], 32), PlanError),
        (lambda engine: engine.prepare(LeaseKey(7, 1 << 70)), LeaseError),
        (lambda engine: engine.publish("r", [1, 2], 8, lease=LeaseKey(7, 1 << 70)), LeaseError),
    ],
)
def test_a_mistake_is_told_at_the_call_and_costs_nobody_else_anything(
    call: Callable[[Engine], object], error: type[Exception]
) -> None:
    with open_engine({"a": cache()}) as producer, open_engine({"a": cache()}) as engine:
        with pytest.raises(error):
            call(engine)
        reference = producer.publish("other", [1, 2], 32)
        engine.pull("other", json.loads(json.dumps(reference.to_params())), [5, 6])
        (done,) = engine.wait(30)
        assert isinstance(done, PullDone)
        engine.publish("another", [1, 2], 32)
        engine.pull("late", REF, [3, 4], timeout_s=0)
        (late,) = engine.wait(30)
        assert isinstance(late, PullFailed)
        assert isinstance(late.reason, PullTimeoutError)  # timers still run


def test_numbers_of_numpy_survive_json() -> None:
    with open_engine({"a": cache()}) as producer, open_engine({"a": cache()}) as engine:
        blocks: Any = np.array([1, 2])
        tokens: Any = np.int64(32)
        first: Any = np.int32(0)
        limit_s: Any = np.float32(30)
        reference = producer.publish("r", blocks, tokens, first_blocks=[first])
        engine.pull("r", json.loads(json.dumps(reference.to_params())), [5, 6], timeout_s=limit_s)
        (done,) = engine.wait(30)
        assert isinstance(done, PullDone)


def test_a_wait_may_be_as_long_as_it_likes() -> None:
    with open_engine({"a": cache()}) as engine:
        for limit_s in (1e12, 10**400, float("inf")):
            engine.pull("r", REF, [3, 4], timeout_s=0)
            (failed,) = engine.wait(limit_s)
            assert isinstance(failed, PullFailed)
        assert engine.wait(-(10**400)) == []


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0"])
def test_nobody_is_told_to_ask_himself(bind: str) -> None:
    config = Config(transports=("cma",), bind=bind, insecure=True)
    with open_engine({"a": cache()}) as producer:
        with Engine({"a": cache()}, SPEC, WHO, config) as engine:
            with pytest.raises(ConfigError, match=r"is no address that others can reach: .*KVRDMA_ADVERTISE"):
                engine.publish("r", [1, 2], 32)
            with pytest.raises(ConfigError, match="is no address that others can reach"):
                engine.announce(producer.endpoint)
            engine.pull("r", producer.publish("r", [1, 2], 32), [1, 2])
            assert isinstance(engine.wait(30)[0], PullDone)
        with Engine({"a": cache()}, SPEC, WHO, replace(config, advertise="127.0.0.1")) as engine:
            assert engine.publish("r", [1, 2], 32).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": RankId(0, 1)}, r"RankId\(pp_rank=0, rank=1\) is outside the 1 stages of 1 ranks"),
        ({"rank": RankId(0, -1)}, "is outside the 1 stages"),
        ({"rank": RankId(2, 0)}, r"name the layers of each stage in EngineShape\(stages=\.\.\.\)"),
        ({"rank": RankId(0, 0.0)}, "rank must be a RankId of two whole numbers"),  # type: ignore[arg-type]
        ({"rank": (0, 0)}, "rank must be a RankId"),
        ({"shape": None}, "shape must be an EngineShape, got None"),
    ],
)
def test_ranks_that_the_engine_does_not_have(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        replace(WHO, **change)
    stages = replace(WHO.shape, stages=(("a",), ("b",)))
    assert replace(WHO, shape=stages, rank=RankId(1, 0)).rank == (1, 0)


def test_a_size_that_is_no_whole_number() -> None:
    with pytest.raises(TopologyError, match=r"tp_size must be .* a whole number, got 1.0"):
        replace(WHO.shape, tp_size=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "x"},
        {"kind": None},
        {"heads": 5},
        {"heads": (0, 2.0)},
        {"heads": (0, 1, 2)},
        {"heads": ("a", "b")},
        {"heads": (False, True)},
        {"total_heads": "a"},
        {"block_size": "a"},
        {"block_size": 16.0},
        {"block_size": True},
        {"group": None},
        {"dims": 5},
        {"dtype": 5},
        {"kv_split": None},
    ],
)
def test_a_spec_of_another_kind(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(LayoutError, match=f"LayerSpec: {name}="):
        replace(SPEC, **change)


def test_numbers_of_numpy_in_a_spec_reach_peers() -> None:
    number: Any = np.int64
    spec = LayerSpec((number(0), number(2)), number(2), number(16), group=number(0))
    assert spec == SPEC
    with open_engine({"a": cache()}, spec) as producer, open_engine({"a": cache()}) as engine:
        engine.pull("r", producer.publish("r", [1], 16), [2])
        assert isinstance(engine.wait(30)[0], PullDone)


@pytest.mark.parametrize("name", [5, "", b"a", "\ud800", None])
def test_layers_whose_name_no_peer_would_read(name: object) -> None:
    with pytest.raises(LayoutError, match="must be named by a text that is not empty"):
        open_engine({name: cache()})


@pytest.mark.parametrize("name", ["", "x" * 257, "\ud800", None, 5])
def test_names_that_no_peer_would_read(name: object) -> None:
    with pytest.raises(ConfigError, match="engine_id must be a text of 1 to 256 characters"):
        replace(WHO, engine_id=name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be texts of at most 256 characters"):
        replace(WHO, model={"model": name or 5})  # type: ignore[dict-item]
