"""The members of `TransferTopology`, one by one, against values worked out by hand."""

from __future__ import annotations

import pytest

from kvrdma.errors import KVRDMAError, TopologyError
from kvrdma.topology import EngineTransferInfo, TransferTopology


def topology(rank: int = 0, tp: int = 1, *, heads: int = 8, mla: bool = False, dcp: int = 1) -> TransferTopology:
    return TransferTopology(rank, tp, 64, "local", mla, False, heads, [object], dcp_size=dcp)


def info(tp: int, *, pp: int = 0, dcp: int = 1) -> EngineTransferInfo:
    return EngineTransferInfo(tp, 4096, 16, 1, remote_pp_rank=pp, remote_dcp_size=dcp)


def test_info_defaults() -> None:
    found = EngineTransferInfo(2, 4096, 16, 1)
    assert (found.remote_pp_rank, found.start_layer, found.end_layer, found.remote_dcp_size) == (0, 0, 0, 1)
    with pytest.raises(AttributeError):
        found.remote_tp_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(("heads", "tp", "expected"), [(8, 1, 8), (8, 4, 2), (8, 16, 1), (2, 4, 1), (1, 1, 1)])
def test_local_physical_heads(heads: int, tp: int, expected: int) -> None:
    assert topology(0, tp, heads=heads).local_physical_heads == expected


def test_dcp_rank() -> None:
    assert [topology(r, 8, dcp=4).dcp_rank for r in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_first_registration_wins_per_stage() -> None:
    topo = topology()
    first, second, stage = info(2), info(4), info(4, pp=1)
    assert topo.register_remote_engine("p", first) is first
    assert topo.register_remote_engine("p", second) is first
    assert topo.register_remote_engine("p", stage) is stage
    assert topo.get_engine_info("p") is first
    assert topo.get_engine_info("p", 1) is stage


def test_unregister_drops_every_stage_and_no_other_engine() -> None:
    topo = topology()
    for name, pp in (("p", 0), ("p", 1), ("q", 0)):
        topo.register_remote_engine(name, info(2, pp=pp))
    topo.unregister_remote_engine("p")
    for pp in (0, 1):
        with pytest.raises(KeyError):
            topo.get_engine_info("p", pp)
    assert topo.get_engine_info("q").remote_tp_size == 2
    topo.unregister_remote_engine("never seen")


def test_own_id_is_refused() -> None:
    with pytest.raises(TopologyError, match="local cannot register itself") as caught:
        topology().register_remote_engine("local", info(1))
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, KVRDMAError)


@pytest.mark.parametrize(("local", "remote", "ratio"), [(2, 4, -2), (4, 2, 2), (4, 4, 1), (1, 8, -8), (6, 2, 3)])
def test_tp_ratio(local: int, remote: int, ratio: int) -> None:
    assert topology(0, local).tp_ratio(remote) == ratio


@pytest.mark.parametrize(("local", "remote"), [(4, 6), (3, 2), (2, 3)])
def test_tp_ratio_names_both_sizes(local: int, remote: int) -> None:
    with pytest.raises(TopologyError, match=f"local tp size {local} and remote tp size {remote}"):
        topology(0, local).tp_ratio(remote)


def test_block_size_ratio() -> None:
    assert [topology().block_size_ratio(n) for n in (64, 32, 16)] == [1, 2, 4]
    for remote in (128, 48):
        with pytest.raises(TopologyError, match=f"local block size 64 .* remote block size {remote}"):
            topology().block_size_ratio(remote)


def test_replication() -> None:
    topo, mla = topology(0, 16), topology(0, 1, mla=True)
    for each in (topo, mla):
        each.register_remote_engine("p8", info(8))
        each.register_remote_engine("p16", info(16))
    assert (topo.is_kv_replicated("p8"), topo.is_kv_replicated("p16")) == (False, True)
    assert (topo.replicates_kv_cache("p8"), topo.replicates_kv_cache("p16")) == (False, True)
    assert (mla.is_kv_replicated("p8"), mla.replicates_kv_cache("p8")) == (False, True)
    assert topo.local_replicates_kv_cache
    assert mla.local_replicates_kv_cache
    assert not topology(0, 8).local_replicates_kv_cache


def test_target_ranks() -> None:
    one = topology(1, 2)
    one.register_remote_engine("p", info(8))
    assert one.target_remote_ranks("p") == [4, 5, 6, 7]
    assert one.handshake_target_ranks(8) == [4, 5, 6, 7]
    assert [topology(r, 16).handshake_target_ranks(8) for r in (0, 1, 2, 15)] == [[0], [0], [1], [7]]
    with pytest.raises(KeyError):
        one.target_remote_ranks("q")


def test_handshake_asks_dcp_sources_only_where_the_remote_is_sharded() -> None:
    assert topology(3, 4, mla=True, dcp=4).handshake_target_ranks(2, 2) == [1]
    assert topology(1, 2, mla=True, dcp=2).handshake_target_ranks(8, 8) == [1, 3, 5, 7]
    assert topology(3, 4, mla=True, dcp=4).handshake_target_ranks(2, 1) == [1]


def test_dcp_source_ranks() -> None:
    assert topology(0, 1).dcp_source_ranks(4, 4) == [0, 1, 2, 3]
    assert [topology(r, 2, dcp=2).dcp_source_ranks(4, 4) for r in range(2)] == [[0, 2], [1, 3]]
    assert [topology(r, 4, dcp=4).dcp_source_ranks(2, 2) for r in range(4)] == [[0], [1], [0], [1]]


def test_dcp_consumer_count() -> None:
    assert topology(0, 4).dcp_consumer_count(8, 8) == 4
    assert topology(0, 8, dcp=8).dcp_consumer_count(2, 2) == 4
    assert topology(0, 2, dcp=2).dcp_consumer_count(8, 8) == 1
    assert topology(0, 8).dcp_consumer_count(2, 1) == 4
    assert topology(0, 2).dcp_consumer_count(8, 1) == 1
    with pytest.raises(TopologyError):
        topology(0, 6).dcp_consumer_count(4, 1)


def test_describe_names_every_value() -> None:
    topo = topology(1, 2, dcp=2)
    topo.register_remote_engine("p", info(8, pp=3, dcp=4))
    expected = (
        "TransferTopology(tp_ratio=-4, num_kv_heads=8, local_tp=2, remote_tp=8, remote_pp=3, local_dcp=2, "
        "remote_dcp=4, local_rank=1, remote_block_len=4096)"
    )
    assert topo.describe("p", 3) == expected
    mla = topology(mla=True)
    mla.register_remote_engine("p", info(1))
    assert "num_kv_heads=1," in mla.describe("p")


@pytest.mark.parametrize(("rank", "tp", "dcp"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)])
def test_impossible_identity_is_refused(rank: int, tp: int, dcp: int) -> None:
    with pytest.raises(TopologyError, match=f"tp_size {tp}, dcp_size {dcp}, tp_rank {rank}"):
        topology(rank, tp, dcp=dcp)
