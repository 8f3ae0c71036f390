"""Mistakes in what a caller hands over are told at the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvrdma
from kvrdma import Config, Engine, EngineShape, Identity, LayerSpec
from kvrdma.errors import LayoutError, PlanError

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


def test_the_package_offers_what_an_engine_needs() -> None:
    assert all(getattr(kvrdma, name) is not None for name in kvrdma.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = kvrdma.Engin
