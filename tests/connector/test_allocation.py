"""vLLM hands over a request's blocks late, more than once, with no tokens or not at all: one load, or one release."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.pd import PREFILL, prefill, prompt_of, shape

if TYPE_CHECKING:
    from tests.helpers.mini_engine import MiniEngine

    Make = Callable[..., MiniEngine]

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("torch")]


def counts(engine: MiniEngine) -> dict[str, int]:
    return asdict(engine.scheduler.connector.scheduler._counts)


def publications(engine: MiniEngine) -> tuple[int, int]:
    """How many were read, and how many nobody asked for in time."""
    stats = engine.ranks[0].connector.worker.engine.stats()
    return stats["publications_done"], stats["publications_expired"]


def pulls(engine: MiniEngine) -> int:
    done: int = engine.ranks[0].connector.worker.engine.stats()["pulls_done"]
    return done


class Deferred:
    """Keeps the calls that would start a load, as newer schedulers do for blocks that are not there yet."""

    def __init__(self, engine: MiniEngine) -> None:
        self.kept: list[tuple[Any, ...]] = []
        self._call = engine.scheduler.connector.update_state_after_alloc
        engine.scheduler.connector.update_state_after_alloc = self._keep

    def _keep(self, request: object, blocks: object, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.kept.append((request, blocks, num_external_tokens))
        else:
            self._call(request, blocks, 0)

    def release(self) -> None:
        for arguments in self.kept:
            self._call(*arguments)


def deferred(engines: Make, prompt: list[int]) -> tuple[MiniEngine, MiniEngine, Deferred]:
    """A request whose load is scheduled, and of which the connector has not heard for several lease times."""
    from tests.helpers.mini_engine import run

    p, d = engines("p", "kv_producer", lease_s=1), engines("d", "kv_consumer")
    late = Deferred(d)
    d.add("d", prompt, prefill(p, "p", prompt), new=4)
    until_s = time.monotonic() + 2.5
    run(p, d, until=lambda: time.monotonic() > until_s)
    assert d.status("d") == "WAITING_FOR_REMOTE_KVS"
    assert len(late.kept) == 1
    assert publications(p) == (0, 0)
    return p, d, late


def test_blocks_that_come_late_are_filled_once(engines: Make) -> None:
    from tests.helpers.mini_engine import run, settle

    prompt = prompt_of(100)
    p, d, late = deferred(engines, prompt)
    late.release()
    late.release()
    run(p, d, until=lambda: d.status("d") == "RUNNING")
    assert d.wrong_positions("d", 0, 100) == []
    assert (counts(d)["requests_loaded"], counts(d)["tokens_loaded"], pulls(d)) == (1, 99, 1)
    settle(p, d)
    assert publications(p) == (1, 0)


@pytest.mark.parametrize("late_call", [False, True])
def test_blocks_that_never_come_release_the_producer(engines: Make, late_call: bool) -> None:
    """The request is aborted first; a call for it afterwards must start nothing in blocks that are somebody else's."""
    from tests.helpers.mini_engine import run, settle

    p, d, late = deferred(engines, prompt_of(100))
    request = d.scheduler.requests["d"]
    d.abort("d")
    d.scheduler._free_blocks(request)  # a scheduler that defers knows that nothing was begun
    if late_call:
        late.release()
    run(p, d, until=lambda: p.blocks_in_use() == 0)
    settle(p, d)
    assert publications(p) == (1, 0)
    assert (counts(d)["requests_loaded"], counts(d)["requests_declined"]) == (0, 1)
    assert d.ranks[0].reported == set()


def test_the_last_answer_counts(engines: Make) -> None:
    """Asked long before with nothing in the cache, scheduled when a part of the prompt is there."""
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer", shape(prefix_caching=True))
    prompt = prompt_of(100)
    request = d.add("d", prompt, prefill(p, "p", prompt), new=4)
    d.scheduler.waiting.remove_requests([request])  # cannot be scheduled yet
    ask = d.scheduler.connector.get_num_new_matched_tokens
    assert ask(request, 0) == (99, True)
    d.add("same", prompt[:64], None, new=2)
    run(d, until=lambda: "same" in d.finished)
    assert ask(request, 32) == (67, True)
    d.scheduler.waiting.add_request(request)
    run(p, d, until=lambda: d.status("d") == "RUNNING")
    assert d.cached["d"] == (64, 35)
    assert counts(d)["tokens_loaded"] == 35
    assert d.wrong_positions("d", 0, 100) == []
    settle(p, d)


def test_a_preempted_request_is_computed_here(engines: Make) -> None:
    """Its loaded blocks are gone, its producer too: vLLM asks again and hands over other blocks."""
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    prompt = prompt_of(100)
    d.add("d", prompt, prefill(p, "p", prompt), new=8)
    run(p, d, until=lambda: d.status("d") == "RUNNING")
    run(p, d, until=lambda: p.blocks_in_use() == 0)
    d.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert d.status("d") == "PREEMPTED"
    d.step()
    assert d.status("d") == "RUNNING"
    assert d.wrong_positions("d", 0, 100) == []
    settle(p, d)
    assert d.finished == {"d": "length"}
    assert (counts(d)["requests_loaded"], pulls(d), d.ranks[0].reported) == (1, 1, {"d"})


def test_a_preempted_prefill_keeps_its_one_lease(engines: Make) -> None:
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer", shape(batched_tokens=48), fence_slots=2), engines("d", "kv_consumer")
    prompt = prompt_of(161)
    p.add("p", prompt, PREFILL)
    for _ in range(2):
        p.step()
        p.step()
        p.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert p.status("p") == "PREEMPTED"
    run(p, until=lambda: "p" in p.finished)
    d.add("d", prompt, p.params["p"], new=4)
    run(p, d, until=lambda: d.status("d") == "RUNNING")
    assert d.cached["d"] == (0, 160)
    assert d.wrong_positions("d", 0, 161) == []
    settle(p, d)
    assert publications(p) == (1, 0)
    assert all(prefill(p, name, prompt)["do_remote_prefill"] for name in ("both", "are free"))


@pytest.mark.parametrize("first", ["with tokens", "without"])
def test_the_first_call_decides(engines: Make, first: str) -> None:
    """Several calls before the ranks hear of any: they load, or they tell the producer, never both."""
    from tests.helpers.mini_engine import settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    connector = d.scheduler.connector
    request = d.add("d", prompt_of(60), prefill(p, "p", prompt_of(60)))
    assert connector.get_num_new_matched_tokens(request, 0) == (59, True)
    blocks = d.scheduler.kv_cache_manager.allocate_slots(request, 60)
    for tokens in (59, 0, 59) if first == "with tokens" else (0, 59, 0):
        connector.update_state_after_alloc(request, blocks, tokens)
    step = connector.build_connector_meta(None)
    assert (len(step.load), len(step.decline)) == ((1, 0) if first == "with tokens" else (0, 1))
    assert not connector.build_connector_meta(None)
    d.ranks[0].connector.worker.begin(step)
    d.scheduler.kv_cache_manager.free(request)
    d.abort("d")
    if first == "with tokens":
        d.scheduler.requests["d"] = request  # as after an abort in mid-load: kept until its end is reported
    settle(p, d, timeout_s=5)
    assert d.ranks[0].reported == ({"d"} if first == "with tokens" else set())


class Cache:
    """Another connector, which has the first tokens of every prompt at once and keeps nothing."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def get_num_new_matched_tokens(self, request: object, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        return max(0, self._tokens - num_computed_tokens), False

    def request_finished_all_groups(self, *_: object) -> tuple[bool, None]:
        return False, None

    def take_events(self) -> tuple[()]:
        return ()

    def has_pending_push_work(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.mark.parametrize(("cached", "loads"), [(64, 0), (0, 1)])
def test_behind_another_connector(engines: Make, cached: int, loads: int) -> None:
    """vLLM's own MultiConnector: the first that has tokens loads; the other is given the same blocks and 0 tokens."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from tests.helpers.mini_engine import run, settle

    class Multi(MultiConnector):  # type: ignore[misc] # vLLM is not type-checked with us
        """Of connectors that are there already; the ranks have only ours."""

        def __init__(self, ours: Any) -> None:  # noqa: ANN401
            self.scheduler = ours.scheduler
            self._connectors = [Cache(cached), ours]
            self._requests_to_connector: dict[str, int] = {}
            self._extra_async_saves: dict[str, int] = {}
            self._kv_cache_config = ours._kv_cache_config
            self._all_support_hma = True

        def build_connector_meta(self, scheduler_output: Any) -> Any:  # noqa: ANN401
            return super().build_connector_meta(scheduler_output).metadata[1]

        def get_kv_connector_stats(self) -> None:
            return None

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    d.scheduler.connector = Multi(d.scheduler.connector)
    prompt = prompt_of(100)
    d.add("d", prompt, prefill(p, "p", prompt), new=4)
    run(p, d, until=lambda: d.status("d") == "RUNNING")
    assert d.cached["d"] == (0, cached or 99)
    assert d.wrong_positions("d", cached, 100) == []
    settle(p, d, timeout_s=5)
    assert publications(p) == (1, 0)
    assert (counts(d)["requests_loaded"], counts(d)["requests_declined"]) == (loads, 1 - loads)
    assert d.ranks[0].reported == ({"d"} if loads else set())
