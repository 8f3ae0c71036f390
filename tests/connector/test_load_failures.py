"""Loads that fail, producers that go away, references that are wrong: the request ends rightly, nothing is left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from kvrdma.errors import ConfigError
from tests.helpers.pd import PREFILL, decode, prefill, prompt_of, shape
from tests.helpers.ports import fixed_port

if TYPE_CHECKING:
    from tests.helpers.mini_engine import MiniEngine

    Make = Callable[..., MiniEngine]

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("torch")]


def counts(engine: MiniEngine) -> dict[str, int]:
    return asdict(engine.scheduler.connector.scheduler._loads.counts)


def loaded(engine: MiniEngine) -> tuple[int, int]:
    """Requests and tokens."""
    now = counts(engine)
    return now["requests_loaded"], now["tokens_loaded"]


def failures(engine: MiniEngine) -> list[str]:
    """Which errors loads failed with, over all ranks."""
    return [name for rank in engine.ranks for name in rank.connector.worker._stats.data["failures"]]


def kill(engine: MiniEngine) -> None:
    engine.close()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_producer_that_died_before_the_read(engines: Make, policy: str, tp: int) -> None:
    from tests.helpers.mini_engine import run, settle

    p = engines("p", "kv_producer")
    d = engines("d", "kv_consumer", shape(tp=tp), policy=policy, control_timeout_s=0.5)
    prompt = prompt_of(100)
    params = prefill(p, "p", prompt)
    kill(p)
    d.add("d", prompt, params, new=3)
    if policy == "recompute":
        run(d, until=lambda: d.status("d") == "RUNNING")
        assert d.wrong_positions("d", 0, 100) == []
    settle(d)
    assert d.finished == {"d": "length" if policy == "recompute" else "error"}
    assert loaded(d) == (0, 0)
    assert all(rank.reported == {"d"} for rank in d.ranks)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_one_rank_of_two_fails(engines: Make, policy: str) -> None:
    """Half of the heads arrived: nobody may decode from them."""
    from tests.helpers.mini_engine import run, settle

    p = engines("p", "kv_producer", shape(tp=2))
    d = engines("d", "kv_consumer", shape(tp=2), policy=policy, pull_timeout_s=1)
    prompt = prompt_of(100)
    params = prefill(p, "p", prompt)
    p.step()  # both ranks publish
    p.ranks[1].connector.shutdown()
    d.add("d", prompt, params, new=3)
    if policy == "recompute":
        run(d, until=lambda: d.status("d") == "RUNNING")
        assert d.wrong_positions("d", 0, 100) == []
    settle(d)
    assert d.finished == {"d": "length" if policy == "recompute" else "error"}
    assert [rank.reported for rank in d.ranks] == [{"d"}, {"d"}]
    assert loaded(d) == (0, 0)
    assert d.ranks[0].connector.worker.engine.stats()["pulls_done"] == 1


def test_an_expired_lease_frees_the_producer_and_fails_the_late_consumer(engines: Make) -> None:
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer", lease_s=0.2), engines("d", "kv_consumer")
    prompt = prompt_of(100)
    params = prefill(p, "p", prompt)
    assert p.blocks_in_use() == 4
    run(p, until=lambda: p.blocks_in_use() == 0, timeout_s=5)
    assert p.ranks[0].connector.worker.engine.stats()["publications_expired"] == 1
    d.add("d", prompt, params)
    settle(p, d)
    assert d.finished == {"d": "error"}
    assert d.ranks[0].connector.worker.engine.stats()["fence_rejections"] == 1


def test_a_waiting_consumer_keeps_the_lease_alive(engines: Make) -> None:
    """It cannot be scheduled for several lease times, and still gets its bytes."""
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer", lease_s=0.6), engines("d", "kv_consumer", shape(blocks=5))
    d.add("big", prompt_of(90, seed=5), None, new=500)
    run(d, until=lambda: d.status("big") == "RUNNING")
    prompt = prompt_of(100)
    d.add("d", prompt, prefill(p, "p", prompt), new=3)
    until_s = time.monotonic() + 2.0
    run(p, d, until=lambda: time.monotonic() > until_s or d.status("big") == "gone")
    assert d.status("d") == "WAITING"
    assert p.blocks_in_use() == 4
    d.abort("big")
    run(p, d, until=lambda: d.status("d") == "RUNNING")
    assert d.wrong_positions("d", 0, 100) == []
    settle(p, d)


def test_params_of_another_connector(engines: Make, caplog: pytest.LogCaptureFixture) -> None:
    from tests.helpers.mini_engine import run

    d = engines("d", "kv_consumer")
    theirs = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]], "remote_host": "h",
              "remote_port": 5600, "tp_size": 1}  # fmt: skip
    with caplog.at_level(logging.WARNING, "kvrdma"):
        for name in ("one", "two"):
            d.add(name, prompt_of(50), theirs, new=2)
            run(d, until=lambda name=name: name in d.finished)
    assert counts(d)["requests_malformed"] == 2
    (record,) = caplog.records
    assert "missing required field `remote_num_tokens`; was it made by another connector?" in record.message


def test_a_consumer_warns_once_a_minute_of_requests_without_params(
    engines: Make, caplog: pytest.LogCaptureFixture
) -> None:
    d = engines("d", "kv_consumer")
    with caplog.at_level(logging.WARNING, "kvrdma"):
        for name in "abc":
            d.add(name, prompt_of(5), None)
        assert len(caplog.records) == 1
        d.scheduler.connector.scheduler._loads._clock = lambda: time.monotonic() + 61
        d.add("d", prompt_of(5), None)
        assert len(caplog.records) == 2
    assert counts(d)["requests_without_params"] == 4
    assert "request a without kv_transfer_params" in caplog.records[0].message


@pytest.mark.parametrize("change", ["a token", "longer before", "shorter"])
def test_kv_of_another_prompt_is_not_used(engines: Make, change: str) -> None:
    """Other tokenizer, other template: upstream serves an answer to another question."""
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    prompt = prompt_of(100)
    other = {"a token": [*prompt[:50], 501, *prompt[51:]], "longer before": [3, *prompt], "shorter": prompt[:90]}
    params = prefill(p, "p", prompt)
    d.add("d", other[change], params, new=3)
    run(p, d, until=lambda: d.status("d") == "RUNNING")
    assert d.wrong_positions("d", 0, len(other[change])) == []
    assert d.cached["d"] == (0, 0)
    assert counts(d)["requests_malformed"] == 1
    settle(p, d, timeout_s=5)  # the producer was told


def test_the_breaker_lets_requests_compute_at_once(engines: Make) -> None:
    """Two loads fail; the third request does not try. After the cool-down one does, and a restart is not blamed."""
    from tests.helpers.mini_engine import run, settle

    p = engines("p", "kv_producer")
    d = engines(
        "d", "kv_consumer", policy="recompute", breaker_threshold=2, control_timeout_s=0.3, breaker_cooldown_s=60
    )
    params = {name: prefill(p, name, prompt_of(40)) for name in ("one", "two", "three")}
    kill(p)
    for name in ("one", "two", "three"):
        d.add(name, prompt_of(40), params[name])
        run(d, until=lambda name=name: name in d.finished)
    assert (loaded(d), counts(d)["requests_declined"]) == ((0, 0), 1)
    assert d.ranks[0].reported == {"one", "two"}
    assert d.scheduler.connector.scheduler._loads.breakers_open() == 1
    again = engines("p", "kv_producer")
    decode(again, d, prompt_of(40, seed=4), "four")
    assert loaded(d) == (1, 39)
    settle(d)


def test_a_restarted_producer_refuses_old_references_and_serves_new_ones(engines: Make) -> None:
    from tests.helpers.mini_engine import run, settle

    bind = f"127.0.0.1:{fixed_port()}"
    p, d = engines("p", "kv_producer", bind=bind), engines("d", "kv_consumer")
    decode(p, d, prompt_of(40), "before")
    settle(p, d)
    stale = prefill(p, "stale", prompt_of(60))
    kill(p)
    again = engines("p", "kv_producer", bind=bind)
    d.add("old", prompt_of(60), stale)
    run(again, d, until=lambda: "old" in d.finished)
    assert d.finished["old"] == "error"
    decode(again, d, prompt_of(70), "new")
    settle(again, d)
    assert d.finished["new"] == "length"


def test_sleep_lets_caches_go_and_waking_serves_again(engines: Make) -> None:
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    decode(p, d, prompt_of(40), "before")
    settle(p, d)
    p.finished.clear()
    stale = prefill(p, "stale", prompt_of(60))
    p.step()
    for rank in p.ranks:
        rank.connector.unregister_kv_caches()
        with pytest.raises(ConfigError, match=r"no caches are registered: .* after sleep restore_kv_caches"):
            rank.connector.get_handshake_metadata()
    p.paused = True
    run(p, until=lambda: p.blocks_in_use() == 0)  # nobody can read them any more
    p.paused = False
    for rank in p.ranks:
        rank.connector.restore_kv_caches()
    p.announce()
    d.add("old", prompt_of(60), stale)
    run(p, d, until=lambda: "old" in d.finished)
    assert d.finished["old"] == "error"
    decode(p, d, prompt_of(70), "new")
    settle(p, d)


def test_a_sleeping_consumer_fails_what_it_was_reading(engines: Make) -> None:
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    d.add("d", prompt_of(60), prefill(p, "p", prompt_of(60)))
    run(d, until=lambda: d.status("d") == "WAITING_FOR_REMOTE_KVS")
    for rank in d.ranks:
        rank.connector.unregister_kv_caches()
        rank.connector.restore_kv_caches()
    d.announce()
    settle(d)
    assert d.finished == {"d": "error"}


def test_no_lease_left_means_not_offered(engines: Make) -> None:
    from tests.helpers.mini_engine import run

    p = engines("p", "kv_producer", fence_slots=1)
    prefill(p, "one", prompt_of(40))
    p.add("two", prompt_of(40), PREFILL)
    run(p, until=lambda: "two" in p.finished)
    assert "two" not in p.params
    assert p.status("two") == "gone"
    assert p.blocks_in_use() == 2


def test_another_connector_loads_and_ours_only_tells(engines: Make) -> None:
    """As under MultiConnector: the request's real blocks, and 0 tokens for us."""
    from tests.helpers.mini_engine import settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    connector = d.scheduler.connector
    request = d.add("d", prompt_of(60), prefill(p, "p", prompt_of(60)))
    blocks = d.scheduler.kv_cache_manager.empty_kv_cache_blocks
    assert connector.get_num_new_matched_tokens(request, 0) == (59, True)
    blocks = d.scheduler.kv_cache_manager.allocate_slots(request, 60)
    assert blocks.get_block_ids() == ([1, 2],)
    connector.update_state_after_alloc(request, blocks, 0)
    connector.update_state_after_alloc(request, blocks, 0)
    step = connector.build_connector_meta(None)
    assert (len(step.decline), step.load) == (1, [])
    d.ranks[0].connector.worker.begin(step)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    d.scheduler.kv_cache_manager.free(request)
    d.abort("d")
    settle(p, d, timeout_s=5)
    assert d.ranks[0].reported == set()


def test_handshake_metadata_of_other_connectors_is_left_alone(engines: Make) -> None:
    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    p.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    decode(p, d, prompt_of(40))


def test_a_quarantined_load_is_reported_when_its_blocks_are_safe(engines: Make) -> None:
    from kvrdma.connector.metadata import Load
    from kvrdma.engine import PullFailed, PullReleased
    from kvrdma.errors import PullTimeoutError
    from kvrdma.reference import PullReference

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    worker = d.ranks[0].connector.worker
    worker._loading["d"] = Load("d", PullReference.from_params(prefill(p, "p", prompt_of(40))), ())
    worker._take([PullFailed("d", PullTimeoutError("too late"), 1, quarantined=True)])
    assert worker.results().finished_recving == set()
    worker._take([PullReleased("d")])
    results = worker.results()
    assert (results.finished_recving, results.failed_recving) == ({"d"}, {"d"})
    assert worker.blame().request_ids == {"d"}
    assert worker.blame() is None
