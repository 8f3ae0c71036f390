"""Sliding windows, windows beside full attention, and MLA: two engines say what one says alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.connector.test_e2e_pd import NOISE, distance, engine, nothing_left, same, transfer
from tests.helpers.pd import PREFILL, prompt_of
from tests.helpers.vllm_engine import EngineProcess

if TYPE_CHECKING:
    from tests.helpers.model_kinds import Kind

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.needs("cma"), pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (31, 33, 64, 100, 500)
"""Up to the window of 64 and beyond it."""
WINDOWS = ("window", "hybrid")


class Pair(NamedTuple):
    name: str
    kind: Kind
    block_size: int
    prefill: EngineProcess
    decode: EngineProcess


@pytest.fixture(scope="module", params=[pytest.param("window", marks=pytest.mark.full), "hybrid", "mla"])
def pair(tiny_model: Callable[[str], str], request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A producer and a consumer of one kind. The producer's chunks leave what is behind the window; MLA has none."""
    from tests.helpers.model_kinds import KINDS

    name = request.param
    kind, model = KINDS[name], tiny_model(name)
    chunks = {"max_num_batched_tokens": 128} if name in WINDOWS else {}
    p = engine(model, "kv_producer", **kind.arguments, **chunks)
    d = engine(model, "kv_consumer", **kind.arguments, enable_prefix_caching=True)
    try:
        p.wait_ready(), d.wait_ready()
        yield Pair(name, kind, kind.arguments.get("block_size", 32), p, d)
    finally:
        d.close()
        p.close()


def counted(pair: Pair) -> tuple[int, int]:
    """Tokens from another engine, and bytes."""
    return pair.decode.call("seen")["external_tokens"], pair.decode.call("stats")["pulled_bytes"]


def test_the_kv_groups_are_those_meant(pair: Pair) -> None:
    for each in (pair.prefill, pair.decode):
        assert each.call("groups") == pair.kind.groups


@pytest.mark.parametrize("length", LENGTHS)
def test_answers_equal_those_of_one_engine(pair: Pair, length: int) -> None:
    prompt = prompt_of(length, length)
    alone, before = pair.prefill.generate(f"alone{length}", prompt), counted(pair)
    same(transfer(pair.prefill, pair.decode, f"same{length}", prompt), alone)
    tokens, nbytes = (now - then for now, then in zip(counted(pair), before, strict=True))
    assert tokens == length - 1
    assert nbytes == pair.kind.nbytes(length - 1, pair.block_size)
    nothing_left(pair.prefill, pair.decode)


def test_wrong_kv_changes_the_answer(pair: Pair) -> None:
    """The negative control: one block of one KV group is another request's."""
    for group in range(len(pair.kind.groups)):
        check_wrong_block(pair, group)
    nothing_left(pair.prefill, pair.decode)


def check_wrong_block(pair: Pair, group: int) -> None:
    prompts = prompt_of(500, seed=10 + group), prompt_of(500, seed=20 + group)
    alone = pair.prefill.generate("wrong-alone", prompts[0])
    handed = [
        pair.prefill.generate(f"wrong-p{n}", prompt, PREFILL, max_tokens=1).params for n, prompt in enumerate(prompts)
    ]
    assert handed[0] is not None
    assert handed[1] is not None
    handed[0]["remote_block_ids"][group][-2] = handed[1]["remote_block_ids"][group][-2]
    assert distance(pair.decode.generate("wrong-d", prompts[0], handed[0]), alone) > 10 * NOISE
    pair.decode.generate("right-d", prompts[1], handed[1])  # releases it


def test_what_was_pulled_serves_shorter_prompts_too(pair: Pair) -> None:
    """A window that ended at 167 began inside a block; a prompt that ends at 160 sees more of that block."""
    prompt = prompt_of(168, seed=3)
    hit = 0 if pair.name == "mla" else 160  # vLLM has no prefix cache for MLA on a CPU without AMX
    for name, asked, cached in (("first", prompt, 0), ("second", [*prompt[:160], 7], hit)):
        before = pair.decode.call("seen")["local_tokens"]
        same(transfer(pair.prefill, pair.decode, name, asked), pair.prefill.generate(f"{name}-alone", asked))
        assert pair.decode.call("seen")["local_tokens"] - before == cached
    nothing_left(pair.prefill, pair.decode)
