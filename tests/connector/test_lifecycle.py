"""Requests from prefill to decode through vLLM's real scheduler: what is pulled, when, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.pd import PREFILL, decode, prefill, prompt_of, shape

if TYPE_CHECKING:
    from tests.helpers.mini_engine import MiniEngine

    Make = Callable[..., MiniEngine]

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("torch")]


def pulled_bytes(engine: MiniEngine) -> int:
    return sum(rank.connector.worker.engine.stats()["pulled_bytes"] for rank in engine.ranks)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 500])
def test_all_but_the_last_token_comes_from_the_producer(engines: Make, length: int) -> None:
    from tests.helpers.mini_engine import settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    decode(p, d, prompt_of(length))
    assert d.cached["d"] == (0, length - 1)
    assert pulled_bytes(d) == (length - 1) * 2 * 4 * 64 * 4  # layers, heads, content, bytes
    settle(p, d)
    assert d.finished == {"d": "length"}


@pytest.mark.parametrize("theirs", [{"tp": 1}, {"tp": 2}, {"pp": 2}, {"batched_tokens": 48}])
def test_a_request_can_be_pulled_before_its_producer_takes_another_step(engines: Make, theirs: dict[str, Any]) -> None:
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer", shape(**theirs)), engines("d", "kv_consumer")
    prompt = prompt_of(129)
    d.add("d", prompt, prefill(p, "p", prompt), new=4)
    run(d, until=lambda: d.status("d") == "RUNNING")
    assert d.cached["d"] == (0, 128)
    assert d.wrong_positions("d", 0, 129) == []
    settle(p, d)
    assert p.blocks_in_use() == 0


def test_a_prefill_that_is_aborted_leaves_no_lease_behind(engines: Make) -> None:
    from tests.helpers.mini_engine import settle

    p = engines("p", "kv_producer", shape(batched_tokens=48))
    for number in range(3):
        p.add(f"p{number}", prompt_of(161), PREFILL)
        p.step()
        p.step()
        worker = p.ranks[0].connector.worker
        assert worker.engine._producer._book._prepared != {}
        p.abort(f"p{number}")
        settle(p)
        assert worker.engine._producer._book._prepared == {}
        assert {worker.engine._fence.word(slot) & 1 for slot in range(8)} == {0}


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp 1 to 2": ({"tp": 1}, {"tp": 2}),
    "tp 2 to 1": ({"tp": 2}, {"tp": 1}),
    "tp 2 to 2": ({"tp": 2}, {"tp": 2}),
    "tp 8 to 1, each head twice": ({"tp": 8}, {"tp": 1}),
    "tp 2 to 8": ({"tp": 2}, {"tp": 8}),
    "pp 2 to 1": ({"pp": 2}, {"pp": 1}),
    "pp 1 to 2": ({"pp": 1}, {"pp": 2}),
    "pp 2 tp 2 to tp 4": ({"pp": 2, "tp": 2}, {"tp": 4}),
    "blocks 32 to 64": ({"block_size": 32}, {"block_size": 64}),
    "blocks 64 to 32": ({"block_size": 64}, {"block_size": 32}),
    "tp 1 to 2, blocks 32 to 64": ({"tp": 1}, {"tp": 2, "block_size": 64}),
    "chunked prefill": ({"batched_tokens": 48}, {}),
    "tp 1 to 2, blocks 64 to 32, chunked prefill": (
        {"tp": 1, "block_size": 64, "batched_tokens": 48},
        {"tp": 2, "block_size": 32, "batched_tokens": 48},
    ),
    "full and sliding window": ({"windows": (0, 48)}, {"windows": (0, 48)}),
    "sliding window only, tp 1 to 2": ({"windows": (48,)}, {"windows": (48,), "tp": 2}),
    "mla, tp 2 to 1": ({"mla": True, "tp": 2}, {"mla": True}),
    "mla, tp 1 to 2, blocks 64 to 16": ({"mla": True, "block_size": 64}, {"mla": True, "tp": 2, "block_size": 16}),
    "mla, dcp 2 by 1 token to dcp 1": ({"mla": True, "tp": 2, "dcp": 2}, {"mla": True}),
    "mla, dcp 1 to dcp 2 by blocks": ({"mla": True}, {"mla": True, "tp": 2, "dcp": 2, "interleave": 32}),
    "mla, dcp 4 by 8 to dcp 2 by 1": (
        {"mla": True, "tp": 4, "dcp": 4, "interleave": 8},
        {"mla": True, "tp": 2, "dcp": 2},
    ),
    "gqa, dcp 2 by 1 to tp 2": ({"tp": 8, "dcp": 2}, {"tp": 2}),
    "gqa, tp 2 to dcp 2 by 16": ({"tp": 2}, {"tp": 8, "dcp": 2, "interleave": 16}),
    "full and sliding window, blocks 32 to 64": ({"windows": (0, 48)}, {"windows": (0, 48), "block_size": 64}),
}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_state_is_that_of_the_prompt_but_its_last_token(engines: Make, tp: int) -> None:
    from tests.helpers.mini_engine import settle

    hybrid = shape(windows=(0, 0), state=True, tp=tp)
    p, d = engines("p", "kv_producer", hybrid), engines("d", "kv_consumer", hybrid)
    for number, length in enumerate((2, 33, 97, 161)):
        decode(p, d, prompt_of(length, number), f"d{number}")
        assert d.cached[f"d{number}"] == (0, length - 1)
        settle(p, d)
        p.finished.clear()


def test_a_state_of_other_tokens_is_seen(engines: Make) -> None:
    """The negative control: a state that was not pulled makes the next one wrong."""
    from tests.helpers.mini_engine import run

    hybrid = shape(windows=(0, 0), state=True)
    p, d = engines("p", "kv_producer", hybrid), engines("d", "kv_consumer", hybrid)
    prompt = prompt_of(97)
    d.add("d", prompt, prefill(p, "p", prompt), new=4)
    run(p, d, until=lambda: d.status("d") == "RUNNING")
    assert d.wrong_positions("d", 0, 97) == []
    d._state("d", d.ranks[0].caches["model.layers.1.self_attn.attn"])[:] += 1
    d.step()
    assert d.wrong_positions("d", 0, 98) == [("model.layers.1.self_attn.attn", 97)]


@pytest.mark.parametrize("name", SHAPES)
def test_engines_of_different_shapes(engines: Make, name: str) -> None:
    from tests.helpers.mini_engine import settle

    theirs, ours = SHAPES[name]
    p, d = engines("p", "kv_producer", shape(**theirs)), engines("d", "kv_consumer", shape(**ours))
    for number, length in enumerate((1, 33, 97, 161)):
        decode(p, d, prompt_of(length, number), f"d{number}")
        assert d.cached[f"d{number}"] == (0, length - 1)
        settle(p, d)
        p.finished.clear()


def test_a_partial_prefix_hit_pulls_the_rest(engines: Make) -> None:
    from tests.helpers.mini_engine import settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer", shape(prefix_caching=True))
    prompt = prompt_of(100)
    decode(p, d, prompt, "first")
    settle(p, d)
    before, p.finished = pulled_bytes(d), {}
    decode(p, d, prompt[:64] + prompt_of(40, seed=2), "second")
    assert d.cached["second"] == (64, 103 - 64)
    assert pulled_bytes(d) - before == (103 - 64) * 2048
    settle(p, d)


def test_a_prefill_that_generated_more_than_one_token(engines: Make) -> None:
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    p.add("p", prompt_of(63), PREFILL, new=4)
    run(p, until=lambda: "p" in p.finished)
    assert p.params["p"]["remote_num_tokens"] == 63
    d.add("d", prompt_of(63), p.params["p"], new=4)
    run(p, d, until=lambda: d.status("d") == "RUNNING")
    assert d.cached["d"] == (0, 62)
    assert d.wrong_positions("d", 0, 63) == []
    settle(p, d)


def test_a_full_prefix_hit_pulls_nothing_and_frees_the_producer(engines: Make) -> None:
    from tests.helpers.mini_engine import settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer", shape(prefix_caching=True))
    prompt = prompt_of(97)  # three full blocks and one token, which is computed anyway
    decode(p, d, prompt, "first")
    settle(p, d)
    before, p.finished = pulled_bytes(d), {}
    decode(p, d, prompt, "second")
    assert d.cached["second"] == (96, 0)
    assert pulled_bytes(d) == before
    assert not any("second" in rank.reported for rank in d.ranks)
    settle(p, d, timeout_s=5)  # well within the lease of 30 s


def test_a_prompt_that_wants_prompt_logprobs_loads_nothing(engines: Make) -> None:
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    prompt = prompt_of(40)
    request = d.add("d", prompt, prefill(p, "p", prompt), new=2)
    request.skip_reading_prefix_cache = True
    run(p, d, until=lambda: "d" in d.finished)
    assert pulled_bytes(d) == 0
    settle(p, d, timeout_s=5)


@pytest.mark.parametrize("status", ["FINISHED_ABORTED", "FINISHED_ERROR"])
def test_a_prefill_that_did_not_finish_is_not_offered(engines: Make, status: str) -> None:
    from vllm.v1.request import RequestStatus

    p = engines("p", "kv_producer", shape(batched_tokens=32))
    p.add("p", prompt_of(100), PREFILL)
    p.step()
    assert p.blocks_in_use() > 0
    p.scheduler.finish_requests("p", RequestStatus[status])
    assert p.blocks_in_use() == 0
    assert p.status("p") == "gone"
    assert p.params == {}


def test_a_request_without_params_is_not_kept(engines: Make) -> None:
    from tests.helpers.mini_engine import run

    p = engines("p", "kv_both")
    p.add("r", prompt_of(40), None, new=2)
    run(p, until=lambda: "r" in p.finished)
    assert p.params == {}
    assert not any(p.idle().values())


def test_aborted_before_it_was_scheduled(engines: Make) -> None:
    """The producer is told, and nobody reports a request that the scheduler no longer knows."""
    from tests.helpers.mini_engine import settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    prompt = prompt_of(100)
    d.add("d", prompt, prefill(p, "p", prompt))
    d.abort("d")
    assert d.status("d") == "gone"
    settle(p, d, timeout_s=5)
    assert not any(rank.reported for rank in d.ranks)


def test_aborted_while_it_waits_for_blocks(engines: Make) -> None:
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer", shape(blocks=5))
    prompt = prompt_of(100)
    d.add("big", prompt_of(90, seed=5), None, new=20)
    run(d, until=lambda: d.status("big") == "RUNNING")
    d.add("d", prompt, prefill(p, "p", prompt))
    for _ in range(3):
        d.step()
    assert d.status("d") == "WAITING"
    d.abort("d")
    settle(p, d)
    assert not any("d" in rank.reported for rank in d.ranks)


def test_aborted_while_it_is_read(engines: Make) -> None:
    """Its blocks stay reserved until nothing can write into them; then both sides are free at once."""
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer"), engines("d", "kv_consumer")
    prompt = prompt_of(100)
    params = prefill(p, "p", prompt)  # its ranks have not heard of it yet: the fence says wait
    d.add("d", prompt, params)
    run(d, until=lambda: d.status("d") == "WAITING_FOR_REMOTE_KVS")
    d.step()
    d.paused = True
    d.abort("d")
    assert d.status("d") == "FINISHED_ABORTED"
    assert d.blocks_in_use() == 4
    d.paused = False
    run(d, until=lambda: d.status("d") == "gone", timeout_s=5)
    assert d.blocks_in_use() == 0
    settle(p, d, timeout_s=5)
    assert [rank.reported for rank in d.ranks] == [{"d"}]


def test_a_fast_consumer_waits_for_the_producers_ranks(engines: Make) -> None:
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer", shape(tp=2)), engines("d", "kv_consumer")
    prompt = prompt_of(100)
    d.add("d", prompt, prefill(p, "p", prompt), new=4)
    for _ in range(20):
        d.step()
    assert d.status("d") == "WAITING_FOR_REMOTE_KVS"
    run(p, d, until=lambda: d.status("d") == "RUNNING")
    assert d.wrong_positions("d", 0, 100) == []
    settle(p, d)


def test_many_requests_at_once(engines: Make) -> None:
    from tests.helpers.mini_engine import run, settle

    p, d = engines("p", "kv_producer", shape(tp=2)), engines("d", "kv_consumer", shape(tp=2, block_size=64))
    prompts = {f"r{number}": prompt_of(20 + 11 * number, number) for number in range(12)}
    for name, prompt in prompts.items():
        d.add(name, prompt, prefill(p, name, prompt), new=3)
    run(p, d, until=lambda: len(d.finished) == len(prompts))
    assert set(d.finished.values()) == {"length"}
    assert all(rank.reported == set(prompts) for rank in d.ranks)
    settle(p, d)


def test_a_decoder_serves_two_prefillers(engines: Make) -> None:
    from tests.helpers.mini_engine import settle

    p, q, d = engines("p", "kv_producer"), engines("q", "kv_producer"), engines("d", "kv_consumer")
    decode(p, d, prompt_of(50), "one")
    decode(q, d, prompt_of(70, seed=3), "two")
    settle(p, q, d)
    assert d.finished == {"one": "length", "two": "length"}


def test_the_next_turn_is_pulled_back(engines: Make) -> None:
    """P to D, then what D computed back to P, which pulls all but the new part of the prompt."""
    from tests.helpers.mini_engine import run

    p = engines("p", "kv_both", bidirectional_kv_xfer=True, kv_recompute_threshold=64)
    d = engines("d", "kv_both", bidirectional_kv_xfer=True, decoder_kv_blocks_ttl=60)
    prompt = prompt_of(100)
    d.add("d", prompt, prefill(p, "p", prompt), new=5)
    run(p, d, until=lambda: "d" in d.finished)
    back = d.params["d"]
    assert (back["do_remote_decode"], back["do_remote_prefill"]) == (True, False)
    assert back["remote_num_tokens"] == 104  # the fifth token was sampled, never computed
    longer = prompt + [7] * 5 + prompt_of(30, seed=9)
    p.add("p2", longer, back)
    run(p, d, until=lambda: p.status("p2") in {"RUNNING", "gone"} or "p2" in p.finished)
    assert p.params["p2"]["remote_num_tokens"] == 135
    assert pulled_bytes(p) == 104 * 2048
    run(p, d, until=lambda: d.ranks[0].connector.worker.engine.stats()["publications_done"] == 1)
    d.add("d2", longer, p.params["p2"], new=2)
    run(p, d, until=lambda: d.status("d2") == "RUNNING")
    assert d.wrong_positions("d2", 0, 135) == []
    run(p, d, until=lambda: "d2" in d.finished)
    assert p.blocks_in_use() == 0
    assert d.blocks_in_use() == 5  # kept for the next turn, for 60 s


def test_a_short_turn_is_computed_again(engines: Make) -> None:
    from tests.helpers.mini_engine import run

    p = engines("p", "kv_both", bidirectional_kv_xfer=True, kv_recompute_threshold=64)
    d = engines("d", "kv_both", bidirectional_kv_xfer=True)
    d.add("d", prompt_of(50), prefill(p, "p", prompt_of(50)), new=2)
    run(p, d, until=lambda: "d" in d.finished)
    p.add("p2", prompt_of(50) + [7] * 2 + [9] * 20, d.params["d"])
    run(p, d, until=lambda: "p2" in p.finished)
    assert pulled_bytes(p) == 0
    run(p, d, until=lambda: d.blocks_in_use() == 0, timeout_s=5)


@pytest.mark.parametrize("windows", [(0, 48), (48,)], ids=["full and window", "window only"])
def test_kv_that_goes_through_host_memory(
    engines: Make, windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator whose memory cannot be read: only the copies in host memory are registered."""
    from tests.helpers.mini_engine import settle

    for module in ("scheduler", "worker"):
        monkeypatch.setattr(f"kvrdma.connector.{module}.stages_in_host_memory", lambda _: True)
    p = engines("p", "kv_producer", shape(windows=windows))
    d = engines("d", "kv_consumer", shape(windows=windows, tp=2))
    for rank in (*p.ranks, *d.ranks):
        registered = {region.addr for region in rank.connector.worker.engine.layout.regions}
        assert not registered & {cache.data_ptr() for cache in rank.caches.values()}
    decode(p, d, prompt_of(168))
    settle(p, d)
    assert d.cached["d"] == (0, 167)
