"""Agents of a small real transformer: whatever way KV takes, the logits are the same, bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrdma.errors import ConfigError, LayoutError, PlanError
from kvrdma.store import StoreServer
from kvrdma.testing import PeerProcess
from tests.helpers.stores import cma, until
from tests.helpers.tagged import busy

torch = pytest.importorskip("torch")

from small_transformer import (  # noqa: E402
    BLOCK,
    FACTS,
    HIDDEN,
    SmallTransformer,
    make_batch,
    make_caches,
)

from kvrdma.agent import AgentConfig, IntermediateTensors, KVTransferAgent, TransferConfig  # noqa: E402
from kvrdma.agent.connector import StoreConnector  # noqa: E402

pytestmark = [pytest.mark.needs("cma"), pytest.mark.needs("torch")]

PROMPTS = [
    [(3 + n) % 101 for n in range(21)],
    [(50 + 2 * n) % 101 for n in range(8)],
    [(7 * n) % 101 for n in range(30)],
]
THERE = [[5, 2, 9], [30], [11, 4, 12, 0]]
HERE = [[20, 21, 22], [1], [40, 39, 38, 37]]
MODEL = SmallTransformer()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    monkeypatch.setenv("KVRDMA_TRANSPORTS", "cma")
    monkeypatch.setenv("KVRDMA_BREAKER_COOLDOWN_S", "0.5")
    with StoreServer(32 << 20, cma()) as server:
        yield server
        until(lambda: not server.stats()["held"] and not server.stats()["filling"], server.stats)


def agent_at(store: StoreServer | str, rank: int = 0, role: str = "kv_both", **options: Any) -> KVTransferAgent:  # noqa: ANN401
    facts = options.pop("facts", FACTS)
    endpoint = store if isinstance(store, str) else str(store.endpoint)
    transfer = TransferConfig(kv_role=role, kv_connector_extra_config={"stores": [endpoint], **options})
    return KVTransferAgent(rank, 0, AgentConfig(transfer, facts))


def poisoned(heads: int = 2, layers: int = 3) -> list[Any]:
    return [cache.fill_(float("nan")) for cache in make_caches(heads, layers)]


def last_rows(hidden: Any, prompts: Sequence[Sequence[int]]) -> list[Any]:  # noqa: ANN401
    ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0)
    return [hidden[end - 1 : end] for end in ends]


def logits(hidden: Any, prompts: Sequence[Sequence[int]], blocks: Sequence[Sequence[int]], caches: Any) -> list[Any]:  # noqa: ANN401
    """Of three more tokens of every prompt; its blocks must have room for them."""
    scores = []
    for row, prompt, ids in zip(last_rows(hidden, prompts), prompts, blocks, strict=True):
        room = [*ids, 60]
        scores += MODEL.generate(row, len(prompt), room, caches, 3)[1]
    return scores


def reference(prompts: Sequence[Sequence[int]]) -> list[Any]:
    """The same, computed at one place."""
    caches, blocks = make_caches(), HERE[: len(prompts)]
    return logits(MODEL.prefill(make_batch(prompts, blocks), caches), prompts, blocks, caches)


def same(one: Sequence[Any], two: Sequence[Any]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _prefill_and_send(state: SimpleNamespace, endpoint: str, prompts: list[list[int]], rank: int, tp: int) -> None:
    """In another process: prefill, and send one rank's share of the kv heads."""
    caches = make_caches()
    batch = make_batch(prompts, THERE[: len(prompts)])
    hidden = MODEL.prefill(batch, caches)
    each = 2 // tp
    state.mine = [cache[:, rank * each : (rank + 1) * each].contiguous() for cache in caches]
    state.agent = agent_at(endpoint, rank, "kv_producer", facts=replace(FACTS, tp_size=tp))
    state.agent.send_kv_caches_and_hidden_states(MODEL, batch, state.mine, hidden)
    for cache in state.mine:
        cache.fill_(float("nan"))  # the blocks are the sender's again


def send(store: StoreServer, prompts: list[list[int]] = PROMPTS, ranks: Sequence[int] = (0,), tp: int = 1) -> None:
    """Prefill in processes that are killed afterwards."""
    for rank in ranks:
        process = PeerProcess({"KVRDMA_TRANSPORTS": "cma"})
        process.call(_prefill_and_send, str(store.endpoint), prompts, rank, tp)
        process.kill()


def receive_all(store: StoreServer, prompts: list[list[int]] = PROMPTS, **options: Any) -> None:  # noqa: ANN401
    """Everything is there, in its slots and nowhere else, and gives the same logits."""
    with agent_at(store, role="kv_consumer", **options) as agent:
        caches, batch = poisoned(), make_batch(prompts, HERE[: len(prompts)])
        hidden, bypass, back = agent.recv_kv_caches_and_hidden_states(MODEL, batch, caches)
        assert bypass
        assert back is batch
        for cache in caches:
            filled = ~cache.isnan()
            assert int(filled.any(-1).any(1).sum()) == len(batch.slot_mapping)
            assert filled[batch.slot_mapping // BLOCK, :, batch.slot_mapping % BLOCK].all()
            cache.nan_to_num_(0.0)
        assert same(logits(hidden, prompts, HERE, caches), reference(prompts))
        assert isinstance(agent.connector, StoreConnector)
        assert agent.connector._engine is not None
        assert busy(agent.connector._engine) == {}


def test_a_batch_prefilled_elsewhere_decodes_here(store: StoreServer) -> None:
    send(store)
    receive_all(store)


def test_two_senders_of_half_the_heads_and_one_receiver_of_all(store: StoreServer) -> None:
    send(store, ranks=[0], tp=2)
    with agent_at(store, recv_timeout_s=1.0) as agent:
        _, bypass, back = agent.recv_kv_caches_and_hidden_states(MODEL, make_batch(PROMPTS, HERE), make_caches())
        assert not bypass
        assert back.context_lens == (0, 0, 0)
    send(store, ranks=[1], tp=2)
    receive_all(store)


def test_a_sender_of_all_heads_and_two_receivers_of_half(store: StoreServer) -> None:
    send(store)
    caches, batch = make_caches(), make_batch(PROMPTS, HERE)
    MODEL.prefill(batch, caches)
    for rank in range(2):
        with agent_at(store, rank, facts=replace(FACTS, tp_size=2)) as agent:
            mine = poisoned(heads=1)
            hidden, bypass, _ = agent.recv_kv_caches_and_hidden_states(MODEL, batch, mine)
            assert bypass
            assert hidden is not None
            assert hidden.shape == (59, HIDDEN)
            for cache, whole in zip(mine, caches, strict=True):
                slots = batch.slot_mapping
                assert torch.equal(cache[slots // BLOCK, 0, slots % BLOCK], whole[slots // BLOCK, rank, slots % BLOCK])


def test_what_is_there_in_part_is_told_and_computing_the_rest_gives_the_same(store: StoreServer) -> None:
    send(store)
    longer = [[*PROMPTS[0], 1, 2, 3], [9, *PROMPTS[1][1:]], PROMPTS[2][:17]]
    with agent_at(store) as agent:
        caches, batch = poisoned(), make_batch(longer, [[20, 21, 22], [1], [40, 39, 38]])
        states, bypass, back = agent.recv_kv_caches_and_hidden_states(MODEL, batch, caches)
        assert states is None
        assert not bypass
        assert back.context_lens == (16, 0, 16)
        assert [len(set(cache[[20, 21, 40, 39]].isnan().flatten().tolist())) for cache in caches] == [1, 1, 1]
        assert caches[0][[1, 22, 38]].isnan().all()
        for cache in caches:
            cache.nan_to_num_(0.0)
        hidden = MODEL.prefill(back, caches)
        blocks = [[20, 21, 22, 23], [1, 2], [40, 39, 38, 37]]
        expected = make_caches()
        whole = MODEL.prefill(batch, expected)
        assert torch.equal(hidden, whole)
        assert same(logits(hidden, longer, blocks, caches), logits(whole, longer, blocks, expected))
        agent.send_kv_caches_and_hidden_states(MODEL, back, caches, hidden)
    receive_all(store, longer)


def test_a_batch_with_one_prompt_missing(store: StoreServer) -> None:
    send(store, PROMPTS[:2])
    with agent_at(store) as agent:
        caches = make_caches()
        states, bypass, back = agent.recv_kv_caches_and_hidden_states(MODEL, make_batch(PROMPTS, HERE), caches)
        assert (states, bypass) == (None, False)
        assert back.context_lens == (21, 8, 0)
        hidden = MODEL.prefill(back, caches)
        assert same(logits(hidden, PROMPTS, HERE, caches), reference(PROMPTS))


def test_kv_without_states_is_no_reason_to_bypass(store: StoreServer) -> None:
    caches, batch = make_caches(), make_batch(PROMPTS, THERE)
    with agent_at(store) as one, agent_at(store, states=False) as two:
        hidden = MODEL.prefill(batch, caches)
        one.send_kv_caches_and_hidden_states(MODEL, batch, caches, None)
        states, bypass, back = one.recv_kv_caches_and_hidden_states(MODEL, make_batch(PROMPTS, HERE), caches)
        assert (states, bypass, back.context_lens) == (None, False, (21, 8, 30))
        other = make_caches()
        assert two.recv_kv_caches_and_hidden_states(MODEL, make_batch(PROMPTS, HERE), other)[:2] == (None, True)
        one.send_kv_caches_and_hidden_states(MODEL, batch, caches, torch.cat(last_rows(hidden, PROMPTS)))
        states, bypass, _ = one.recv_kv_caches_and_hidden_states(MODEL, make_batch(PROMPTS, HERE), caches)
        assert bypass
        assert torch.equal(states, torch.cat(last_rows(hidden, PROMPTS)))


def test_pipeline_stages_hand_over_their_intermediate_tensors(store: StoreServer) -> None:
    stages = [SmallTransformer(0, 2), SmallTransformer(2, 3)]
    facts = [replace(FACTS, first_layer=0), replace(FACTS, first_layer=2)]
    batch, mine = make_batch(PROMPTS, THERE), [make_caches(layers=2), make_caches(layers=1)]
    middle = stages[0].prefill(batch, mine[0])
    between = IntermediateTensors({"hidden_states": middle, "residual": middle * 2})
    final = stages[1].prefill(batch, mine[1], middle)
    with ExitStack() as stack:
        senders = [stack.enter_context(agent_at(store, rank, facts=facts[rank])) for rank in range(2)]
        senders[0].send_kv_caches_and_hidden_states(stages[0], batch, mine[0], between)
        senders[1].send_kv_caches_and_hidden_states(stages[1], batch, mine[1], final)
        receivers = [stack.enter_context(agent_at(store, rank, facts=facts[rank])) for rank in range(2)]
        here, caches = make_batch(PROMPTS, HERE), [make_caches(layers=2), make_caches(layers=1)]
        first, bypass, _ = receivers[0].recv_kv_caches_and_hidden_states(stages[0], here, caches[0])
        assert bypass
        assert isinstance(first, IntermediateTensors)
        assert torch.equal(first.tensors["hidden_states"], middle)
        assert torch.equal(first.tensors["residual"], middle * 2)
        second, bypass, _ = receivers[1].recv_kv_caches_and_hidden_states(stages[1], here, caches[1])
        assert bypass
        assert torch.equal(second, final)
        assert same(logits(second, PROMPTS, HERE, [*caches[0], *caches[1]]), reference(PROMPTS))


def test_other_models_salts_and_tokens_are_misses(store: StoreServer) -> None:
    send(store)
    batch = make_batch(PROMPTS, HERE)
    with agent_at(store) as agent, agent_at(store, facts=replace(FACTS, model={"model": "another"})) as other:
        asked = replace(batch, salts=[b"adapter"] * 3)
        assert agent.recv_kv_caches_and_hidden_states(MODEL, asked, make_caches())[2].context_lens == (0, 0, 0)
        assert other.recv_kv_caches_and_hidden_states(MODEL, batch, make_caches())[2].context_lens == (0, 0, 0)


def test_an_engine_that_is_a_store_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRDMA_TRANSPORTS", "cma")
    transfer = TransferConfig(kv_role="kv_producer", kv_connector_extra_config={"serve_bytes": 32 << 20})
    with KVTransferAgent(0, 0, AgentConfig(transfer, FACTS)) as sender:
        assert isinstance(sender.connector, StoreConnector)
        assert sender.connector.server is not None
        caches, batch = make_caches(), make_batch(PROMPTS, THERE)
        sender.send_kv_caches_and_hidden_states(MODEL, batch, caches, MODEL.prefill(batch, caches))
        receive_all(sender.connector.server)


def test_a_store_of_its_own_that_holds_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRDMA_TRANSPORTS", "cma")
    extra = {"serve_bytes": 1 << 20, "store_block_tokens": 256 * BLOCK}
    caches, batch = make_caches(), make_batch(PROMPTS, THERE)
    agent = KVTransferAgent(0, 0, AgentConfig(TransferConfig(kv_connector_extra_config=extra), FACTS))
    with agent, pytest.raises(ConfigError, match=r"needs a store of at least .* this one has 1048576"):
        agent.send_kv_caches_and_hidden_states(MODEL, batch, caches, None)


@pytest.mark.parametrize("caches", [None, 5, "caches", torch.zeros(4, 2, 4, 8)])
def test_caches_that_are_no_list(store: StoreServer, caches: object) -> None:
    with agent_at(store) as agent:
        for call in (agent.recv_kv_caches_and_hidden_states, agent.send_kv_caches_and_hidden_states):
            rest = (None,) if call == agent.send_kv_caches_and_hidden_states else ()
            with pytest.raises(LayoutError, match="kv_caches must be one cache per layer, in a list or by name"):
                call(MODEL, make_batch(PROMPTS, THERE), caches, *rest)


def test_a_store_that_is_gone_costs_time_up_to_the_deadline_only(store: StoreServer) -> None:
    with agent_at(store, send_timeout_s=2.0, recv_timeout_s=2.0) as agent:
        caches, batch = make_caches(), make_batch(PROMPTS, THERE)
        hidden = MODEL.prefill(batch, caches)
        agent.send_kv_caches_and_hidden_states(MODEL, batch, caches, hidden)
        store.close()
        began_s = time.monotonic()
        agent.send_kv_caches_and_hidden_states(MODEL, batch, caches, hidden)
        assert agent.recv_kv_caches_and_hidden_states(MODEL, batch, caches)[:2] == (None, False)
        assert time.monotonic() - began_s < 4.0 + 8.0
        assert isinstance(agent.connector, StoreConnector)
        assert agent.connector.stats()["prompts_stored"] == 3
        assert agent.connector._engine is not None
        assert agent.connector._engine.stats()["leases"] == 0


def test_states_too_large_for_their_room_are_not_sent(store: StoreServer) -> None:
    with agent_at(store, states_bytes=1) as agent:  # one page of 64 KiB
        caches, batch = make_caches(), make_batch(PROMPTS, THERE)
        MODEL.prefill(batch, caches)
        agent.send_kv_caches_and_hidden_states(MODEL, batch, caches, torch.randn(59, 4000))
        states, bypass, back = agent.recv_kv_caches_and_hidden_states(MODEL, batch, caches)
        assert (states, bypass, back.context_lens) == (None, False, (21, 8, 30))


def test_mistakes_are_named(store: StoreServer) -> None:
    caches, batch = make_caches(), make_batch(PROMPTS, THERE)
    with agent_at(store, role="kv_consumer") as agent:
        with pytest.raises(ConfigError, match="'kv_consumer' does not send"):
            agent.send_kv_caches_and_hidden_states(MODEL, batch, caches, None)
        agent.recv_kv_caches_and_hidden_states(MODEL, batch, caches)
        with pytest.raises(ConfigError, match="not those of the first call"):
            agent.recv_kv_caches_and_hidden_states(MODEL, batch, make_caches())
        with pytest.raises(PlanError, match="block"):
            agent.recv_kv_caches_and_hidden_states(MODEL, make_batch([PROMPTS[0]], [[1, 2, 99]]), caches)
    with pytest.raises(ConfigError, match="closed"):
        agent.recv_kv_caches_and_hidden_states(MODEL, batch, caches)
    with agent_at(store, role="kv_producer") as agent:
        with pytest.raises(ConfigError, match="'kv_producer' does not receive"):
            agent.recv_kv_caches_and_hidden_states(MODEL, batch, caches)
        with pytest.raises(PlanError, match="block 99"):
            agent.send_kv_caches_and_hidden_states(MODEL, make_batch([PROMPTS[0]], [[1, 2, 99]]), caches, None)
        agent.close()
        agent.close()


def test_agents_leave_nothing_behind(store: StoreServer) -> None:
    def once() -> None:
        with agent_at(store) as agent:
            caches, batch = make_caches(), make_batch(PROMPTS, THERE)
            agent.send_kv_caches_and_hidden_states(MODEL, batch, caches, MODEL.prefill(batch, caches))
            assert agent.recv_kv_caches_and_hidden_states(MODEL, batch, caches)[1]

    def left() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    once()
    until(lambda: not store.stats()["held"], store.stats)
    before = left()
    for _ in range(4):
        once()
    # the store's engines forget the mailboxes and peers of senders that have gone after a while
    until(lambda: left()[1] <= before[1] and left()[0] <= before[0] + 4 * 8, left)
