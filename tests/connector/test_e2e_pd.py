"""Two vLLM engines in processes of their own: what the decoder says equals what one engine says alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from tests.helpers.pd import PREFILL, prompt_of
from tests.helpers.vllm_engine import Answer, EngineProcess

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("cma"), pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (1, 31, 32, 33, 64, 500)
TOKEN_BYTES = 3 * 4 * 2 * 32 * 4
"""Layers, heads, keys and values, head size, float32."""
NOISE = 1e-3
"""The last token is computed by another kernel (a decode step, not a prefill)."""


class Pair(NamedTuple):
    prefill: EngineProcess
    decode: EngineProcess
    alone: dict[int, Answer]
    """What the prefill engine answers by itself, per length."""


def engine(model: str, role: str, **arguments: Any) -> EngineProcess:  # noqa: ANN401
    transfer = {"kv_role": role} | arguments.pop("transfer", {})
    return EngineProcess(model, transfer, **arguments)


@pytest.fixture(scope="module")
def pair(tiny_llama: str) -> Iterator[Pair]:
    """A producer and a consumer of the same shape."""
    p, d = engine(tiny_llama, "kv_producer"), engine(tiny_llama, "kv_consumer", enable_prefix_caching=True)
    try:
        p.wait_ready(), d.wait_ready()
        yield Pair(p, d, {length: p.generate(f"alone{length}", prompt_of(length, length)) for length in LENGTHS})
    finally:
        d.close()
        p.close()


def distance(one: Answer, two: Answer) -> float:
    """The largest difference of a log probability of the first token's five likeliest; 99 for other candidates."""
    first, second = one.logprobs[0], two.logprobs[0]
    return max(abs(first[token] - second[token]) if token in second else 99.0 for token in first)


def same(answer: Answer, alone: Answer) -> None:
    assert answer.tokens == alone.tokens
    for ours, theirs in zip(answer.logprobs, alone.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=NOISE)


def transfer(p: EngineProcess, d: EngineProcess, name: str, prompt: Sequence[int]) -> Answer:
    handed = p.generate(f"p-{name}", prompt, PREFILL, max_tokens=1)
    assert handed.params is not None
    return d.generate(f"d-{name}", prompt, handed.params)


def nothing_left(*engines: EngineProcess) -> None:
    for each in engines:
        assert not any(each.wait_idle().values())


@pytest.mark.parametrize("length", LENGTHS)
def test_answers_equal_those_of_one_engine(pair: Pair, length: int) -> None:
    before = pair.decode.call("seen")["external_tokens"], pair.decode.call("stats")["pulled_bytes"]
    same(transfer(pair.prefill, pair.decode, f"same{length}", prompt_of(length, length)), pair.alone[length])
    after = pair.decode.call("seen")["external_tokens"], pair.decode.call("stats")["pulled_bytes"]
    assert after[0] - before[0] == length - 1
    assert after[1] - before[1] == (length - 1) * TOKEN_BYTES
    nothing_left(pair.prefill, pair.decode)


def test_the_answer_depends_on_every_position(pair: Pair) -> None:
    """The negative control: one other token anywhere, first or last, moves the answer far beyond the noise."""
    for place in (0, 31, 250, 498):
        prompt = prompt_of(500, 500)
        prompt[place] = 3 + (prompt[place] + 100) % 490
        other = pair.prefill.generate(f"other{place}", prompt)
        assert distance(pair.alone[500], other) > 10 * NOISE


def test_wrong_kv_changes_the_answer(pair: Pair) -> None:
    """The negative control of the transfer: one of the sixteen blocks is another request's."""
    prompt = prompt_of(500, seed=8)
    alone = pair.prefill.generate("wrong-alone", prompt)
    handed = [
        pair.prefill.generate(f"wrong-p{seed}", prompt_of(500, seed), PREFILL, max_tokens=1).params for seed in (8, 9)
    ]
    assert handed[0] is not None
    assert handed[1] is not None
    handed[0]["remote_block_ids"][0][7] = handed[1]["remote_block_ids"][0][7]
    answer = pair.decode.generate("wrong-d", prompt, handed[0])
    assert distance(answer, alone) > 10 * NOISE
    pair.decode.generate("right-d", prompt_of(500, 9), handed[1])  # releases it
    nothing_left(pair.prefill, pair.decode)


def test_prefix_hits(pair: Pair) -> None:
    """None, then a part, then all of the prompt but its last token is here already."""
    common = prompt_of(128, seed=3)
    for name, rest, cached, pulled in (("none", 40, 0, 167), ("part", 41, 128, 40), ("all", 1, 128, 0)):
        prompt = common + prompt_of(rest, seed=rest)
        before = pair.decode.call("seen")
        same(transfer(pair.prefill, pair.decode, name, prompt), pair.prefill.generate(f"{name}-alone", prompt))
        after = pair.decode.call("seen")
        assert after["local_tokens"] - before["local_tokens"] == cached
        assert after["external_tokens"] - before["external_tokens"] == pulled
    nothing_left(pair.prefill, pair.decode)


def test_aborts(pair: Pair) -> None:
    """Before it is scheduled and while it waits for the producer; both engines end empty long before the lease."""
    p, d = pair.prefill, pair.decode
    for number in range(6):
        prompt = prompt_of(200, seed=100 + number)
        handed = p.generate(f"abort-p{number}", prompt, PREFILL, max_tokens=1)
        d.call("add", f"abort-d{number}", prompt, handed.params, 200)
        if number % 2:
            d.call("status", "x")  # a step or two in between
        d.call("abort", f"abort-d{number}")
    nothing_left(p, d)
    assert p.call("stats")["publications_expired"] == 0


def test_metrics_reach_prometheus(pair: Pair) -> None:
    metrics = pair.decode.call("metrics")
    pulls = next(value for name, value in metrics.items() if name.startswith("vllm:kvrdma_pull_seconds_count"))
    assert pulls >= 5
    assert pulls == pair.decode.call("stats")["pulls_done"]
