"""What clients and proxies send: odd params, odd ids, the same params twice, aborts. No engine may die of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.pd import decode, prefill, prompt_of, shape

if TYPE_CHECKING:
    from tests.helpers.mini_engine import MiniEngine

    Make = Callable[..., MiniEngine]

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("torch")]

ODD: tuple[Any, ...] = (None, "", "x" * 70_000, "\ud800", -1, 2**63, 1.5, True, [], [[]], [None], {}, {"a": {"b": 1}})


def counts(engine: MiniEngine) -> dict[str, int]:
    return asdict(engine.scheduler.connector.scheduler._counts)


def compute(d: MiniEngine, name: str, prompt: list[int], params: dict[str, Any]) -> None:
    """Run a request to its end, and see that it was decoded from right KV."""
    from tests.helpers.mini_engine import run

    d.add(name, prompt, params, new=2)
    run(d, until=lambda: d.status(name) in {"RUNNING", "gone"})
    if d.status(name) == "RUNNING":
        assert d.wrong_positions(name, 0, len(prompt)) == []
    run(d, until=lambda: name in d.finished)
    assert d.finished[name] == "length"


def places(params: dict[str, Any]) -> list[tuple[str, ...]]:
    """Where a value can be replaced: all keys, and those of the part that is ours."""
    return [*((key,) for key in params), *(("kvrdma", key) for key in params["kvrdma"])]


def test_params_with_an_odd_value_anywhere(engines: Make) -> None:
    from tests.helpers.mini_engine import settle

    p = engines("p", "kv_producer")
    d = engines(
        "d", "kv_consumer", policy="recompute", control_timeout_s=0.2, pull_timeout_s=0.5, breaker_threshold=10**6
    )
    prompt = prompt_of(40)
    given = prefill(p, "p", prompt)
    p.step()
    for number, path in enumerate(places(given)):
        for odd, value in enumerate(ODD):
            if path == ("remote_host",) and isinstance(value, str) and value:
                continue  # a name to look up
            params = copy.deepcopy(given)
            where = params if len(path) == 1 else params["kvrdma"]
            where[path[-1]] = value
            compute(d, f"d{number}.{odd}", prompt, params)
    settle(d)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_params_without_sense_are_no_params(engines: Make, role: str) -> None:
    from tests.helpers.mini_engine import run

    both = engines("b", role, lease_s=0.5, bidirectional_kv_xfer=role == "kv_both")
    every = [{"do_remote_prefill": one, "do_remote_decode": two} for one in (*ODD, True) for two in (*ODD, True)]
    for number, params in enumerate(every):
        both.add(f"r{number}", prompt_of(20), params, new=1)
        run(both, until=lambda name=f"r{number}": name in both.finished)
    run(both, until=lambda: not any(both.idle().values()), timeout_s=20)


@pytest.mark.parametrize("name", ["x" * 300, "cmpl-é|:;\n\x00 \"'", "chatcmpl-1-0", "\udcff", "done", "0"])
def test_ids_are_only_names(engines: Make, name: str) -> None:
    """The two sides' ids differ in general; neither means anything to the other."""
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer", shape(tp=2))
    prompt = prompt_of(70)
    d.add(name[::-1], prompt, prefill(p, name, prompt), new=3)
    run(p, d, until=lambda: d.status(name[::-1]) == "RUNNING")
    assert d.wrong_positions(name[::-1], 0, 70) == []
    settle(p, d, timeout_s=5)
    assert p.ranks[0].connector.worker.engine.stats()["publications_expired"] == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_the_same_params_twice(engines: Make, at_once: bool) -> None:
    """As with several samples of a prompt, or a proxy that tries again: each is right, however it comes about."""
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer", policy="recompute", pull_timeout_s=1)
    prompt = prompt_of(100)
    params = prefill(p, "p", prompt)
    for names in [("a", "b")] if at_once else [("a",), ("b",)]:
        for name in names:
            d.add(name, prompt, params, new=3)
        for name in names:
            run(p, d, until=lambda name=name: d.status(name) in {"RUNNING", "gone"})
            assert d.status(name) == "gone" or d.wrong_positions(name, 0, 100) == []
        settle(p, d)
        for number in range(3):  # takes the blocks that the first has given back
            p.finished.clear()
            decode(p, d, prompt_of(100, seed=10 + number), f"other{names}{number}")
            settle(p, d)
    assert {d.finished["a"], d.finished["b"]} == {"length"}


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("alive", [True, False])
def test_an_abort_at_any_step(engines: Make, steps: int, alive: bool) -> None:
    """With the producer there, or gone without a word; nothing is left, and the engine still serves."""
    from tests.helpers.mini_engine import settle

    p = engines("p", "kv_producer")
    d = engines("d", "kv_consumer", shape(tp=2), control_timeout_s=0.5, pull_timeout_s=1)
    prompt = prompt_of(100)
    params = prefill(p, "p", prompt)
    living = [p, d] if alive else [d]
    if not alive:
        p.close()
    d.add("d", prompt, params, new=200)
    for _ in range(steps):
        for engine in living:
            engine.step()
    d.abort("d")
    settle(*living)
    other = engines("q", "kv_producer")
    decode(other, d, prompt_of(60, seed=2), "after")
    settle(other, d)
    assert d.finished["after"] == "length"
