"""`TransferTopology` against vLLM's class of that name, over every size up to 16."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest

from kvrdma.topology import EngineShape, EngineTransferInfo, RankId, TransferTopology, select_sources

pytestmark = pytest.mark.needs("vllm")

SIZES = range(1, 17)


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.distributed.kv_transfer.kv_connector import utils
    return utils


def answer(call: Callable[[], object]) -> object:
    """The result, or the kind of refusal."""
    try:
        return call()
    except AssertionError:
        return AssertionError
    except KeyError:
        return KeyError


def pair(
    theirs: ModuleType, rank: int, tp: int, heads: int, dcp: int, mla: bool
) -> tuple[TransferTopology, TransferTopology]:
    common = (rank, tp, 64, "local", mla, False, heads, [])
    return TransferTopology(*common, dcp_size=dcp), theirs.TransferTopology(*common, dcp_size=dcp)


@pytest.mark.parametrize("tp", SIZES)
def test_tp_members(theirs: ModuleType, tp: int) -> None:
    """Every rank, head count and remote TP size, MLA or not: same answers, same refusals."""
    for heads, mla, rank in itertools.product(SIZES, (False, True), range(tp)):
        mine, other = pair(theirs, rank, tp, heads, 1, mla)
        assert mine.local_physical_heads == other.local_physical_heads
        assert mine.local_replicates_kv_cache == other.local_replicates_kv_cache
        for remote in SIZES:
            name = f"p{remote}"
            mine.register_remote_engine(name, EngineTransferInfo(remote, 4096, 16, 1))
            other.register_remote_engine(name, theirs.EngineTransferInfo(remote, 4096, 16, 1))
            for call in (
                lambda t, r=remote: t.tp_ratio(r),
                lambda t, r=remote: t.handshake_target_ranks(r),
                lambda t, n=name: t.target_remote_ranks(n),
                lambda t, n=name: t.is_kv_replicated(n),
                lambda t, n=name: t.replicates_kv_cache(n),
                lambda t, n=name: t.describe(n),
            ):
                assert answer(lambda c=call, m=mine: c(m)) == answer(lambda c=call, o=other: c(o))


@pytest.mark.parametrize("tp", SIZES)
def test_dcp_members(theirs: ModuleType, tp: int) -> None:
    for dcp, rank, mla in itertools.product((n for n in SIZES if tp % n == 0), range(tp), (False, True)):
        mine, other = pair(theirs, rank, tp, 8, dcp, mla)
        assert mine.dcp_rank == other.dcp_rank
        for remote_tp, remote_dcp in itertools.product(SIZES, SIZES):
            if remote_tp % remote_dcp:
                continue
            for call in (
                lambda t, a=remote_tp, b=remote_dcp: t.dcp_source_ranks(a, b),
                lambda t, a=remote_tp, b=remote_dcp: t.handshake_target_ranks(a, b),
                lambda t, a=remote_tp, b=remote_dcp: t.dcp_consumer_count(a, b),
            ):
                assert answer(lambda c=call, m=mine: c(m)) == answer(lambda c=call, o=other: c(o))


def test_registry_and_block_ratio(theirs: ModuleType) -> None:
    mine, other = pair(theirs, 0, 1, 8, 1, False)
    for remote in range(1, 257):
        ours, upstream = (answer(lambda t=t, r=remote: t.block_size_ratio(r)) for t in (mine, other))
        assert ours == upstream
    for topology, cls in ((mine, EngineTransferInfo), (other, theirs.EngineTransferInfo)):
        first = cls(2, 1, 16, 1, remote_pp_rank=1, start_layer=3, end_layer=6, remote_dcp_size=2)
        assert topology.register_remote_engine("p", first) is first
        assert topology.register_remote_engine("p", cls(4, 1, 16, 1, 1)) is first
        assert answer(lambda t=topology: t.get_engine_info("p")) is KeyError
        assert (
            answer(lambda t=topology, c=cls: t.register_remote_engine("local", c(1, 1, 1, 1)))
            is AssertionError
        )
        topology.unregister_remote_engine("p")
        assert answer(lambda t=topology: t.get_engine_info("p", 1)) is KeyError


def test_source_selection_agrees_where_vllm_defines_it(theirs: ModuleType) -> None:
    """The general selection reads what vLLM would, for the sizes vLLM serves."""
    checked = 0
    for tp, remote_tp, heads in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        for rank in range(tp):
            _, other = pair(theirs, rank, tp, heads, 1, False)
            if remote_tp <= max(heads, tp):  # beyond, vLLM refuses or reads replicas twice
                got = select_sources(EngineShape(tp, heads), RankId(0, rank), EngineShape(remote_tp, heads))
                wanted = other.handshake_target_ranks(remote_tp)
                assert [s.rank.rank for s in got] == wanted, (tp, remote_tp, heads, rank)
                checked += 1
    for tp, remote_tp in itertools.product((2, 4, 8, 16), (2, 4, 8, 16)):
        for rank in range(tp):
            _, other = pair(theirs, rank, tp, 1, tp, True)
            local, remote = (EngineShape(n, 1, n, 16, is_mla=True) for n in (tp, remote_tp))
            got = select_sources(local, RankId(0, rank), remote)
            assert [s.rank.rank for s in got] == other.handshake_target_ranks(remote_tp, remote_tp)
            checked += 1
    assert checked > 400
