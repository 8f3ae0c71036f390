"""The parts of an agent: configuration, factory, batches, states."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvrdma.agent import AgentConfig, CacheFacts, KVTransferAgent, ModelInput, TransferConfig, register_connector
from kvrdma.agent.batch import read_batch, read_starts
from kvrdma.agent.config import ConnectorOptions
from kvrdma.agent.factory import unregister_connector
from kvrdma.config import Config
from kvrdma.errors import ConfigError, MessageError, PlanError
from kvrdma.page_format import Kind

FACTS = CacheFacts(model={"model": "m"}, block_size=4, num_kv_heads=4)


class Recorder:
    """A connector of somebody else's."""

    def __init__(self, *made_with: object) -> None:
        self.calls: list[tuple[object, ...]] = [made_with]

    def send_kv_caches_and_hidden_states(self, *arguments: object) -> None:
        self.calls.append(arguments)

    def recv_kv_caches_and_hidden_states(self, *arguments: object) -> tuple[str, bool, str]:
        self.calls.append(arguments)
        return "states", True, "input"

    def close(self) -> None:
        self.calls.append(())


@pytest.fixture
def recorder() -> Iterator[str]:
    module = ModuleType("a_connector_of_somebody")
    module.Recorder = Recorder  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    register_connector("recorder", module.__name__, "Recorder")
    yield "recorder"
    unregister_connector("recorder")
    del sys.modules[module.__name__]


def agent_of(transfer: TransferConfig | None) -> KVTransferAgent:
    return KVTransferAgent(3, 1, AgentConfig(transfer, FACTS))


def test_an_agent_passes_through_to_the_connector_it_made(recorder: str) -> None:
    agent = agent_of(TransferConfig(kv_connector=recorder))
    assert isinstance(agent.connector, Recorder)
    with agent:
        agent.send_kv_caches_and_hidden_states("model", "batch", "caches", "hidden")
        assert agent.recv_kv_caches_and_hidden_states("model", "batch", "caches") == ("states", True, "input")
    assert agent.connector.calls == [
        (3, 1, agent.config),
        ("model", "batch", "caches", "hidden"),
        ("model", "batch", "caches"),
        (),
    ]


@pytest.mark.parametrize(
    ("transfer", "says"),
    [
        (None, "kv_transfer_config is not set"),
        (TransferConfig(kv_connector=None), "no KV transfer instance: kv_connector None"),
        (TransferConfig(kv_role=None), "kv_role None"),
        (TransferConfig(kv_role="producer"), "kv_role 'producer'"),
        (TransferConfig(kv_connector="nixl"), "'nixl' is unknown: registered are kvrdma"),
        (TransferConfig(), "give stores"),
        (TransferConfig(kv_connector_extra_config={"store": "a:1"}), "unknown store; known: .*stores"),
        (TransferConfig(kv_connector_extra_config={"stores": "a"}), "HOST:PORT"),
        (TransferConfig(kv_connector_extra_config={"stores": "a:1", "send_timeout_s": 0}), "send_timeout_s=0"),
        (TransferConfig(kv_connector_extra_config={"stores": "a:1,b:1", "replicas": 3}), "replicas=3"),
        (TransferConfig(kv_connector_extra_config=[1]), "must be a mapping, got list"),  # type: ignore[arg-type]
        (TransferConfig(kv_connector_extra_config={5: 1}), "unknown 5; known"),  # type: ignore[dict-item]
        *(
            (TransferConfig(kv_connector_extra_config={"stores": "a:1", **extra}), says)
            for extra, says in (
                ({"stores": 5}, "Expected `array`, got `int` - at `.*stores`"),
                ({"send_timeout_s": "5"}, "got `str` - at `.*send_timeout_s`"),
                ({"recv_timeout_s": None}, "got `null` - at `.*recv_timeout_s`"),
                ({"look_timeout_s": float("nan")}, "look_timeout_s=nan"),
                ({"replicas": True}, "got `bool` - at `.*replicas`"),
                ({"replicas": 0}, "replicas=0 must be at least 1"),
                ({"serve_bytes": "1GiB"}, "got `str` - at `.*serve_bytes`"),
                ({"serve_bytes": -1}, "serve_bytes=-1"),
                ({"serve_bind": 5}, "serve_bind"),
                ({"serve_bind": "host"}, "kv_connector_extra_config: serve_bind: 'host' is not HOST:PORT"),
                ({"store_block_tokens": 0}, "store_block_tokens=0"),
                ({"store_block_tokens": 1 << 30}, "store_block_tokens=1073741824 must be at most 65536"),
                ({"states": "no"}, "got `str` - at `.*states`"),  # which is true
                ({"states_bytes": -5}, "states_bytes=-5"),
            )
        ),
    ],
)
def test_configurations_that_cannot_work(transfer: TransferConfig | None, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        agent_of(transfer)
    assert isinstance(caught.value, ConfigError)


def test_names_are_taken_once_and_resolved_late(recorder: str) -> None:
    with pytest.raises(ConfigError, match="'recorder' is registered already"):
        register_connector(recorder, "other", "Other")
    for name, module, kind in (("late", "no_such_module", "X"), ("empty", "a_connector_of_somebody", "Missing")):
        register_connector(name, module, kind)  # nothing is imported yet
        try:
            with pytest.raises(ConfigError, match=f"'{name}' \\({module}.{kind}\\) cannot be loaded"):
                agent_of(TransferConfig(kv_connector=name))
        finally:
            unregister_connector(name)


def test_roles() -> None:
    roles = [TransferConfig(kv_role=role) for role in ("kv_producer", "kv_consumer", "kv_both", None)]
    assert [each.is_kv_producer for each in roles] == [True, False, True, False]
    assert [each.is_kv_consumer for each in roles] == [False, True, True, False]


def test_a_text_of_stores() -> None:
    assert list(ConnectorOptions.read({"stores": "a:1, b:2,"}).stores) == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("tp", "heads", "kind", "shape", "shares"),
    [
        (1, 4, "attention", 1, [0]),
        (2, 4, "attention", 2, [0, 1, 0, 1]),  # two pipeline stages
        (8, 2, "attention", 2, [0, 0, 0, 0, 1, 1, 1, 1]),
        (4, 1, "mla", 1, [0, 0, 0, 0]),
    ],
)
def test_ranks_that_hold_the_same_heads_count_once(
    tp: int, heads: int, kind: Kind, shape: int, shares: list[int]
) -> None:
    facts = replace(FACTS, tp_size=tp, num_kv_heads=heads, kind=kind)
    assert facts.shape.tp_size == shape
    assert [facts.share(rank) for rank in range(len(shares))] == shares


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tp_size": 0}, "tp_size=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": "4"}, "block_size='4'"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"first_layer": -1}, "first_layer=-1"),
        ({"kind": "x"}, "CacheFacts: kind='x' is none of attention, mla, cpu, state"),
        ({"kind": "state"}, "CacheFacts: kind='state' is none that a store can hold"),
        ({"dims": 5}, "CacheFacts: dims=5"),
        ({"dtype": 5}, "CacheFacts: dtype=5"),
        ({"kv_split": None}, "CacheFacts: kv_split=None"),
        ({"model": None}, "model must map fields to texts"),
        ({"model": {"a": 5}}, "'a'=5 must be texts"),
        ({"model": {"a": "x" * 257}}, "must be texts of at most 256 characters"),
    ],
)
def test_facts_of_no_cache(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(FACTS, **given)


@pytest.mark.parametrize("rank", [-1, None, True])
def test_ranks_of_no_engine(rank: int) -> None:
    with pytest.raises(ConfigError, match="is not a whole number from 0"):
        FACTS.share(rank)


@pytest.mark.parametrize("given", [(5, "a", "b"), ("", "a", "b"), ("x", "", "b"), ("x", "a", None)])
def test_connectors_without_a_name(given: tuple[str, str, str]) -> None:
    with pytest.raises(ConfigError, match="registered by three texts"):
        register_connector(*given)


# Batches


def test_a_batch_is_taken_apart() -> None:
    slots = [20, 21, 22, 23, 8, 12, 13, 14]
    batch = ModelInput(np.arange(8), [5, 3], slots, salts=[b"", b"x"])
    one, two = read_batch(batch, 4)
    assert (one.tokens.tolist(), one.blocks, one.start, one.end, one.salt) == ([0, 1, 2, 3, 4], [5, 2], 0, 5, b"")
    assert (two.tokens.tolist(), two.blocks, two.start, two.end, two.salt) == ([5, 6, 7], [3], 5, 8, b"x")
    nested = SimpleNamespace(
        input_tokens=[1, 2], attn_metadata=SimpleNamespace(seq_lens=[2], slot_mapping=np.array([[4, 5]]))
    )
    assert read_batch(nested, 4)[0].blocks == [1]
    assert read_batch(ModelInput([], [], []), 4) == []


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (ModelInput([1, 2], [1], [4, 5]), "1 tokens in all has 2 input_tokens"),
        (ModelInput([1, 2], [2], [4]), "1 slots"),
        (ModelInput([1, 2], [2], [4, 6]), "token 1 is in slot 6, slot 5 follows"),
        (ModelInput([1, 2], [2], [-1, 5]), "token 0 is in slot -1"),
        (ModelInput([1, 2], [2], [5, 6]), "token 0 is in slot 5, slot 4 follows"),
        (ModelInput([1.0, 2.0], [2], [4, 5]), "input_tokens must be integers"),
        (ModelInput([], [0], []), "prompt 0 of the batch has 0 tokens"),
        (ModelInput([1], [1], [4], salts=[b"", b""]), "2 salts"),
        (ModelInput([1], [1], [4], salts=["tenant"]), "salt of prompt 0 must be bytes, got str"),  # type: ignore[list-item]
        (SimpleNamespace(input_tokens=[1]), "needs slot_mapping: SimpleNamespace has none"),
    ],
)
def test_batches_that_do_not_add_up(batch: object, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_batch(batch, 4)


def test_what_is_in_place_already() -> None:
    assert read_starts(ModelInput([], [], []), 2) == [0, 0]
    assert read_starts(SimpleNamespace(), 2) == [0, 0]
    assert read_starts(SimpleNamespace(context_lens=np.array([3, 0])), 2) == [3, 0]
    for lengths, says in (([3], "1 context_lens for 2 prompts"), ([3.5, 0], "must be integers")):
        with pytest.raises(PlanError, match=says):
            read_starts(SimpleNamespace(context_lens=lengths), 2)


@pytest.mark.parametrize("salts", [5, "a", b"a"])
def test_salts_that_are_no_list(salts: Any) -> None:  # noqa: ANN401
    with pytest.raises(PlanError, match="salts must be a list of one bytes per prompt"):
        read_batch(ModelInput([1], [1], [4], salts=salts), 4)


# States

torch = pytest.importorskip("torch")

from kvrdma.agent.states import IntermediateTensors, StatesPort, join_states, slice_states  # noqa: E402

SPANS = [(0, 3), (3, 4), (4, 9)]


@pytest.mark.parametrize("field", ["input_tokens", "slot_mapping", "seq_lens"])
@pytest.mark.parametrize(
    "given",
    [
        [[1], [2, 3]],
        torch.ones(1, requires_grad=True),
        torch.ones(1, dtype=torch.int64, device="meta"),
        torch.ones(1, dtype=torch.int64).to_sparse(),
        torch.ones(1, dtype=torch.complex64).conj(),
        [1 << 70],
    ],
)
def test_integers_that_are_none(field: str, given: Any) -> None:  # noqa: ANN401
    with pytest.raises(PlanError, match=f"{field} must be integers"):
        read_batch(replace(ModelInput([1], [1], [4]), **{field: given}), 4)


@pytest.mark.parametrize("rows", [9, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"])
def test_states_come_back_as_they_were(rows: int, dtype: str) -> None:
    states = torch.randint(0, 2, (rows, 2, 5)).to(getattr(torch, dtype))
    pieces = slice_states(states, SPANS)
    joined = join_states(pieces, "cpu")
    assert joined.dtype == states.dtype
    assert torch.equal(joined.view(torch.uint8), states.view(torch.uint8))
    assert torch.equal(
        join_states(pieces[1:2], "cpu").float(), states[3:4].float() if rows == 9 else states[1:2].float()
    )


@pytest.mark.parametrize("wrap", [IntermediateTensors, dict])
def test_named_states_come_back_by_name(wrap: Callable[[object], object]) -> None:
    states = {"hidden_states": torch.randn(9, 4), "residual": torch.randn(9, 0), "scale": torch.randn(9).half()}
    joined = join_states(slice_states(wrap(states), SPANS), "cpu")
    assert isinstance(joined, IntermediateTensors)
    assert list(joined.tensors) == list(states)
    assert all(torch.equal(joined.tensors[name], each) for name, each in states.items())


def test_states_of_neither_tokens_nor_prompts() -> None:
    with pytest.raises(PlanError, match=r"states of \[4\] rows for a batch of 3 prompts of 9 tokens"):
        slice_states(torch.zeros(4, 2), SPANS)
    with pytest.raises(PlanError, match=r"\[3, 9\] rows"):
        slice_states({"a": torch.zeros(9, 2), "b": torch.zeros(3, 2)}, SPANS)


@pytest.mark.parametrize("states", [np.zeros((9, 2)), "abc", [torch.zeros(9, 2)], {"a": None}, torch.zeros(())])
def test_states_that_are_none(states: object) -> None:
    with pytest.raises(PlanError, match="states must be torch tensors"):
        slice_states(states, SPANS)


@pytest.mark.parametrize(
    "states",
    [
        torch.zeros(9, 2, device="meta"),
        torch.zeros(9, 2).to_sparse(),
        {"a": torch.zeros(9, 2), "b": torch.zeros(9, 2).to_sparse()},
    ],
)
def test_states_without_numbers_of_their_own(states: object) -> None:
    with pytest.raises(PlanError, match="must be dense tensors with memory, not quantized"):
        slice_states(states, SPANS)


def test_states_named_by_numbers() -> None:
    with pytest.raises(PlanError, match="states must be named by texts, got 1"):
        slice_states({1: torch.zeros(9, 2)}, SPANS)


def test_states_that_are_views_of_others() -> None:
    numbers = torch.randn(9, 2, dtype=torch.complex64)
    for states in (numbers.conj(), numbers.conj().imag, torch.randn(2, 9).T):
        assert torch.equal(join_states(slice_states(states, SPANS), "cpu"), states)


@pytest.mark.parametrize("other", [torch.zeros(9, 5), torch.zeros(9, 4).half(), torch.zeros(9, 4, 1)])
def test_states_of_two_senders_that_do_not_fit(other: object) -> None:
    one, two = slice_states(torch.zeros(9, 4), SPANS), slice_states(other, SPANS)
    with pytest.raises(MessageError, match=r"prompts differ: prompt 0 torch.float32 \[4\] a row, prompt 1 torch.float"):
        join_states([one[0], two[1]], "cpu")


def test_damaged_states() -> None:
    one = slice_states(torch.randn(9, 4), SPANS)
    two = slice_states({"a": torch.randn(9, 4)}, SPANS)
    bad = [b"", one[0][:20], one[0][:-1], b"\0" * 64]
    bad += [one[0].replace(b"float32", dtype) for dtype in (b"Tensor7", b"float99")]
    for piece in bad:
        with pytest.raises(MessageError):
            join_states([piece], "cpu")
    with pytest.raises(
        MessageError, match="different kinds: prompt 0 a tensor of a row per token, prompt 1 tensors by"
    ):
        join_states([one[0], two[1]], "cpu")
    three = slice_states({"b": torch.randn(9, 4)}, SPANS)
    with pytest.raises(MessageError, match=r"different names: prompt 0 \['a'\], prompt 1 \['b'\]"):
        join_states([two[0], three[1]], "cpu")


def test_more_memory_for_states_than_there_is() -> None:
    nowhere: Any = None
    with pytest.raises(ConfigError, match=f"states_bytes={1 << 60} does not fit into memory: .*; give fewer"):
        StatesPort(nowhere, Config(), 1 << 60, "states")
