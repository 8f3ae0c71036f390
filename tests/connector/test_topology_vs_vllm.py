"""`TransferTopology` against vLLM's class of that name, over every size up to 16."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Iterable
from types import ModuleType

import pytest

from kvrdma.models import stages
from kvrdma.topology import (
    EngineShape,
    EngineTransferInfo,
    RankId,
    TransferTopology,
    consumers_of,
    select_sources,
)

pytestmark = pytest.mark.needs("vllm")

SIZES = range(1, 17)


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("vllm.distributed.kv_transfer.kv_connector.utils")


def pair(
    theirs: ModuleType, rank: int, tp: int, heads: int, dcp: int, *, mla: bool
) -> tuple[TransferTopology, TransferTopology]:
    backends: list[type] = []
    mine = TransferTopology(rank, tp, 64, "local", mla, False, heads, backends, dcp_size=dcp)
    return mine, theirs.TransferTopology(rank, tp, 64, "local", mla, False, heads, backends, dcp_size=dcp)


def answer(topology: TransferTopology, method: str, *args: object) -> object:
    """The result, or the kind of refusal."""
    try:
        return getattr(topology, method)(*args)
    except (AssertionError, KeyError) as error:
        return AssertionError if isinstance(error, AssertionError) else KeyError


def compare(both: tuple[TransferTopology, TransferTopology], calls: Iterable[tuple[str, tuple[object, ...]]]) -> None:
    for method, args in calls:
        mine, other = (answer(topology, method, *args) for topology in both)
        assert mine == other, (method, args, both[0])


@pytest.mark.parametrize("tp", SIZES)
def test_tp_members(theirs: ModuleType, tp: int) -> None:
    """Every rank, head count and remote TP size, MLA or not: same answers, same refusals."""
    for heads, mla, rank in itertools.product(SIZES, (False, True), range(tp)):
        both = mine, other = pair(theirs, rank, tp, heads, 1, mla=mla)
        assert mine.local_physical_heads == other.local_physical_heads
        assert mine.local_replicates_kv_cache == other.local_replicates_kv_cache
        for remote in SIZES:
            name = f"p{remote}"
            mine.register_remote_engine(name, EngineTransferInfo(remote, 4096, 16, 1))
            other.register_remote_engine(name, theirs.EngineTransferInfo(remote, 4096, 16, 1))
            compare(both, [("tp_ratio", (remote,)), ("handshake_target_ranks", (remote,))])
            named = ("target_remote_ranks", "is_kv_replicated", "replicates_kv_cache", "describe")
            compare(both, [(method, (name,)) for method in named])


@pytest.mark.parametrize("tp", SIZES)
def test_dcp_members(theirs: ModuleType, tp: int) -> None:
    named = ("dcp_source_ranks", "handshake_target_ranks", "dcp_consumer_count")
    for dcp, rank, mla in itertools.product((n for n in SIZES if tp % n == 0), range(tp), (False, True)):
        both = pair(theirs, rank, tp, 8, dcp, mla=mla)
        assert both[0].dcp_rank == both[1].dcp_rank
        sizes = [(a, b) for a, b in itertools.product(SIZES, SIZES) if a % b == 0]
        compare(both, [(method, size) for method in named for size in sizes])


def test_registry_and_block_ratio(theirs: ModuleType) -> None:
    both = pair(theirs, 0, 1, 8, 1, mla=False)
    compare(both, [("block_size_ratio", (remote,)) for remote in range(1, 257)])
    for topology, cls in zip(both, (EngineTransferInfo, theirs.EngineTransferInfo), strict=True):
        first = cls(2, 1, 16, 1, remote_pp_rank=1, start_layer=3, end_layer=6, remote_dcp_size=2)
        assert answer(topology, "register_remote_engine", "p", first) is first
        assert answer(topology, "register_remote_engine", "p", cls(4, 1, 16, 1, 1)) is first
        assert answer(topology, "get_engine_info", "p") is KeyError
        assert answer(topology, "register_remote_engine", "local", cls(1, 1, 1, 1)) is AssertionError
        topology.unregister_remote_engine("p")
        assert answer(topology, "get_engine_info", "p", 1) is KeyError


def test_selection_agrees_under_tp(theirs: ModuleType) -> None:
    """Beyond these sizes vLLM refuses, or reads replicas of a head twice."""
    sizes = (1, 2, 4, 8, 16)
    for tp, remote_tp, heads in itertools.product(sizes, repeat=3):
        if remote_tp > max(heads, tp):
            continue
        for rank in range(tp):
            _, other = pair(theirs, rank, tp, heads, 1, mla=False)
            got = select_sources(EngineShape(tp, heads), RankId(0, rank), EngineShape(remote_tp, heads))
            assert [s.rank.rank for s in got] == other.handshake_target_ranks(remote_tp)


def test_selection_agrees_under_dcp(theirs: ModuleType) -> None:
    for tp, remote_tp in itertools.product((2, 4, 8, 16), repeat=2):
        for rank in range(tp):
            _, other = pair(theirs, rank, tp, 1, tp, mla=True)
            local, remote = (EngineShape(n, 1, n, 16, is_mla=True) for n in (tp, remote_tp))
            got = select_sources(local, RankId(0, rank), remote)
            assert [s.rank.rank for s in got] == other.handshake_target_ranks(remote_tp, remote_tp)


def test_consumers_are_as_many_as_vllm_counts(theirs: ModuleType) -> None:
    """For every producer rank that is read at all; vLLM makes the others wait for a message too."""
    for tp, remote_tp in itertools.product((1, 2, 4, 8), repeat=2):
        for dcp, remote_dcp in itertools.product({1, tp}, {1, remote_tp}):
            consumer = EngineShape(tp, 1, dcp, is_mla=True)
            producer = EngineShape(remote_tp, 1, remote_dcp, is_mla=True)
            _, other = pair(theirs, 0, tp, 1, dcp, mla=True)
            counts = {len(consumers_of(producer, rank, consumer)) for rank in producer.all_ranks()} - {0}
            assert counts == {other.dcp_consumer_count(remote_tp, remote_dcp)}, (consumer, producer)


def test_pipeline_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.utils import get_pp_indices

    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    for layers in range(1, 100):
        for pp in range(1, min(layers, 16) + 1):
            mine = [(part.start, part.stop) for part in stages(layers, pp)]
            assert mine == [get_pp_indices(layers, stage, pp) for stage in range(pp)], (layers, pp)
