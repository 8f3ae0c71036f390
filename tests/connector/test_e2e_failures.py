"""vLLM engines whose producer dies or comes back: under both policies, and nothing is left afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.connector.test_e2e_pd import engine, nothing_left, same, transfer
from tests.helpers.pd import PREFILL, prompt_of
from tests.helpers.ports import fixed_port
from tests.helpers.vllm_engine import EngineProcess

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("cma"), pytest.mark.slow, pytest.mark.timeout(900)]

EXTRA = {"control_timeout_s": 2, "pull_timeout_s": 15}


class Decoders(NamedTuple):
    fail: EngineProcess
    recompute: EngineProcess


@pytest.fixture(scope="module")
def decoders(tiny_llama: str) -> Iterator[Decoders]:
    """One decoder per policy."""
    made = Decoders(*[decoder(tiny_llama, policy) for policy in Decoders._fields])
    try:
        for each in made:
            each.wait_ready()
        yield made
    finally:
        for each in made:
            each.close()


def decoder(model: str, policy: str) -> EngineProcess:
    return engine(model, "kv_consumer", transfer={"kv_load_failure_policy": policy, "kv_connector_extra_config": EXTRA})


def producer(model: str, port: int = 0, **extra: Any) -> EngineProcess:  # noqa: ANN401
    extra |= {"bind": f"127.0.0.1:{port}"} if port else {}
    return engine(model, "kv_producer", transfer={"engine_id": "prefill", "kv_connector_extra_config": extra})


def test_producers_that_die_and_come_back(tiny_llama: str, decoders: Decoders) -> None:
    prompt = prompt_of(300)
    port = fixed_port()
    first = producer(tiny_llama, port).wait_ready()
    try:
        alone = first.generate("alone", prompt)
        same(transfer(first, decoders.fail, "before", prompt), alone)
        same(transfer(first, decoders.recompute, "before", prompt), alone)
        handed = [first.generate(f"p{number}", prompt, PREFILL, max_tokens=1).params for number in range(2)]
        params = handed[0]
        assert params is not None
    finally:
        first.kill()

    failed = decoders.fail.generate("killed", prompt, handed[0])
    assert (failed.finish_reason, failed.tokens) == ("error", ())
    again = decoders.recompute.generate("killed", prompt, handed[1])
    same(again, alone)
    nothing_left(*decoders)

    second = producer(tiny_llama, port).wait_ready()  # same name, same port
    try:
        assert decoders.fail.generate("stale", prompt, params).finish_reason == "error"
        same(transfer(second, decoders.fail, "after", prompt), alone)
        same(transfer(second, decoders.recompute, "after", prompt), alone)
        nothing_left(second, *decoders)
    finally:
        second.close()


def test_a_producer_killed_while_it_is_read(tiny_llama: str, decoders: Decoders) -> None:
    """Half of the data has arrived when it dies; the other half is read afterwards."""
    prompt = prompt_of(300, seed=4)
    victim = producer(tiny_llama).wait_ready()
    try:
        alone = victim.generate("alone", prompt)
        handed = [victim.generate(f"p{number}", prompt, PREFILL, max_tokens=1).params for number in range(2)]
        for each, params in zip(decoders, handed, strict=True):
            each.call("read_by_halves")
            each.call("add", "midway", prompt, params, 6)
        for each in decoders:
            each.wait_until("half_read")
    finally:
        victim.kill()
    before = [each.call("stats")["pulls_failed"] for each in decoders]
    for each in decoders:
        each.call("read_on")
    failed, again = decoders.fail.result("midway"), decoders.recompute.result("midway")
    assert (failed.finish_reason, failed.tokens) == ("error", ())
    same(again, alone)
    assert [each.call("stats")["pulls_failed"] for each in decoders] == [number + 1 for number in before]
    nothing_left(*decoders)


def test_a_producer_that_froze(tiny_llama: str, decoders: Decoders) -> None:
    """It is stopped between prefill and read: no error ever comes. When it goes on, it serves as before."""
    prompt = prompt_of(300, seed=6)
    frozen = producer(tiny_llama, lease_s=5).wait_ready()
    try:
        alone = frozen.generate("alone", prompt)
        handed = [frozen.generate(f"p{number}", prompt, PREFILL, max_tokens=1).params for number in range(2)]
        frozen.freeze()
        failed = decoders.fail.generate("frozen", prompt, handed[0])
        assert (failed.finish_reason, failed.tokens) == ("error", ())
        again = decoders.recompute.generate("frozen", prompt, handed[1])
        same(again, alone)
        assert max(failed.elapsed_s, again.elapsed_s) < EXTRA["pull_timeout_s"] + 5
        nothing_left(*decoders)
        frozen.thaw()
        for each in decoders:
            before = each.call("seen")["external_tokens"]
            same(transfer(frozen, each, "thawed", prompt), alone)
            assert each.call("seen")["external_tokens"] == before + 299
        nothing_left(frozen, *decoders)
    finally:
        frozen.close()
