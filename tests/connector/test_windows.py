"""Sliding windows and the consumer's own prefix cache: what another request finds there must be whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.helpers.pd import decode, prefill, prompt_of, shape

if TYPE_CHECKING:
    from tests.helpers.mini_engine import MiniEngine

    Make = Callable[..., MiniEngine]

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("torch")]

PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "window only": ({"windows": (48,)}, {"windows": (48,)}, 160),
    "full and window": ({"windows": (0, 48)}, {"windows": (0, 48)}, 160),
    "tp 1 to 2": ({"windows": (0, 48)}, {"windows": (0, 48), "tp": 2}, 160),
    "blocks 64 to 32": ({"windows": (0, 48), "block_size": 64}, {"windows": (0, 48)}, 160),
    "blocks 32 to 64": ({"windows": (0, 48)}, {"windows": (0, 48), "block_size": 64}, 0),
    "blocks 32 to 64, window only": ({"windows": (48,)}, {"windows": (48,), "block_size": 64}, 0),
}
"""The last number: how much of the second prompt the consumer finds in its cache."""


def found(engine: MiniEngine, request_id: str) -> list[list[bool]]:
    """Whether other requests find each of its blocks in the prefix cache, per KV group."""
    blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
    return [[blocks[block].block_hash is not None for block in group] for group in engine.blocks_of(request_id)]


@pytest.mark.parametrize("name", PAIRS)
def test_a_window_in_the_consumers_cache_is_whole(engines: Make, name: str) -> None:
    """A window of 48 behind position 167 begins at 120, inside a block that shorter prompts see more of.

    A producer keeps whole blocks of its own size: a larger one of the consumer's is not whole, and not to be found.
    """
    from tests.helpers.mini_engine import settle

    theirs, ours, cached = PAIRS[name]
    p, d = engines("p", "kv_producer", shape(**theirs)), engines("d", "kv_consumer", shape(**ours, prefix_caching=True))
    prompt = prompt_of(168)
    decode(p, d, prompt, "first")
    settle(p, d)
    p.finished.clear()
    shorter = [*prompt[: 167 // d.shape.block_size * d.shape.block_size], 7]
    decode(p, d, shorter, "second")
    assert d.cached["second"] == (cached, len(shorter) - 1 - cached)
    settle(p, d)


def test_a_block_that_is_not_whole_is_not_found_before_its_request_runs(engines: Make) -> None:
    """The load has ended and vLLM has cached its blocks, but finds no room for the next token in this step."""
    from tests.helpers.mini_engine import run, settle

    p = engines("p", "kv_producer", shape(windows=(0, 48)))
    d = engines("d", "kv_consumer", shape(windows=(0, 48), prefix_caching=True, block_size=64))
    prompt = prompt_of(168)
    d.add("d", prompt, prefill(p, "p", prompt), new=2)
    run(p, d, until=lambda: d.scheduler.finished_recving_kv_req_ids)
    with patch.object(d.scheduler.kv_cache_manager, "allocate_slots", return_value=None):
        d.step()
    assert d.status("d") == "WAITING"
    assert found(d, "d") == [[True, True, False], [False, False, False]]
    settle(p, d)


def test_a_window_says_where_it_begins_when_it_is_passed_on(engines: Make) -> None:
    """A decoder that has a block only from inside offers it so, and the next turn's prefill does not take it for whole.

    The first producer does not say where its window begins, so nothing before position 120 is taken from it.
    """
    from tests.helpers.mini_engine import run

    first, second = (
        engines(name, "kv_both", shape(windows=(0, 48), prefix_caching=True), bidirectional_kv_xfer=True)
        for name in ("first", "second")
    )
    d = engines("d", "kv_both", shape(windows=(0, 48)), bidirectional_kv_xfer=True)
    prompt = prompt_of(168)
    params = prefill(first, "p", prompt)
    assert params["kvrdma"].pop("first_tokens") == [0, 96]
    d.add("d", prompt, params, new=2)
    run(first, d, until=lambda: "d" in d.finished)
    assert d.params["d"]["kvrdma"]["first_blocks"] == [0, 3]
    assert d.params["d"]["kvrdma"]["first_tokens"] == [0, 120]
    second.add("turn two", [*prompt, 7, 7, *prompt_of(30, seed=2)], d.params["d"])
    run(second, d, until=lambda: "turn two" in second.finished)
    assert second.cached["turn two"] == (0, 169)
    second.add("shorter", [*prompt[:160], 9], None, new=2)
    run(second, until=lambda: second.status("shorter") == "RUNNING")
    assert second.wrong_positions("shorter", 0, 161) == []


def test_local_hits_of_full_attention_do_not_stand_for_those_of_windows(engines: Make) -> None:
    """With a state beside them, vLLM may take the full group's hit for all: a window's tail would be missing."""
    only_state = engines("a", "kv_consumer", shape(windows=(0, 0), state=True))
    with_window = engines("b", "kv_consumer", shape(windows=(48, 0), state=True))
    assert only_state.scheduler.connector.supports_divergent_local_hybrid_hits
    assert not with_window.scheduler.connector.supports_divergent_local_hybrid_hits
