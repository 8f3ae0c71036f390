"""Which RDMA ports are used and how they are paired, over saved trees of hosts; and what blobs are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvrdma.blob import seal
from kvrdma.errors import BlobError, ConfigError, ConnectError, TransportUnavailableError
from kvrdma_verbs.blobs import VerbsAddress, VerbsKey, WirePort
from kvrdma_verbs.devices import PeerPort, Port, choose_lanes, find_ports
from tests.helpers import host_tree

V4 = bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 1])
LOCAL = b"\xfe\x80" + bytes(6) + b"\x0a\xc0\xeb\xff\xfe\x12\x34\x57"


def _tree(name: str, root: Path) -> Path:
    host_tree.build(name, root)
    return root / "sys"


def test_roce_prefers_version_2_and_a_mapped_address(tmp_path: Path) -> None:
    ports = find_ports(_tree("roce-two-nics", tmp_path), {})
    assert [(port.name, port.gid_index, port.host, port.gbps) for port in ports] == [
        ("mlx5_0:1", 3, "10.77.0.1", 100),
        ("mlx5_1:1", 1, None, 100),
    ]
    assert ports[0].gid == V4
    assert all(port.ethernet for port in ports)


def test_settings_choose_devices_order_and_gid(tmp_path: Path) -> None:
    sys = _tree("roce-two-nics", tmp_path)
    ports = find_ports(sys, {"KVRDMA_VERBS_DEVICES": "mlx5_1, mlx5_0:1", "KVRDMA_VERBS_GID_INDEX": "0"})
    assert [(port.name, port.gid_index) for port in ports] == [("mlx5_1:1", 0), ("mlx5_0:1", 0)]
    with pytest.raises(ConfigError, match="names mlx4_0, which this host does not have"):
        find_ports(sys, {"KVRDMA_VERBS_DEVICES": "mlx4_0"})
    with pytest.raises(ConfigError, match="KVRDMA_VERBS_GID_INDEX='x'"):
        find_ports(sys, {"KVRDMA_VERBS_GID_INDEX": "x"})
    with pytest.raises(TransportUnavailableError, match=r"mlx5_0:1 has no GID 99"):
        find_ports(sys, {"KVRDMA_VERBS_GID_INDEX": "99"})


def test_soft_roce_as_in_the_guest_of_the_lane(tmp_path: Path) -> None:
    (port,) = find_ports(_tree("soft-roce", tmp_path), {})
    assert (port.name, port.gid_index, port.host, port.gbps, port.numa_node) == ("rxe0:1", 1, "10.77.0.1", 10, -1)


def test_a_host_without_rdma_says_so(tmp_path: Path) -> None:
    with pytest.raises(TransportUnavailableError, match="no RDMA device at all"):
        find_ports(_tree("vm", tmp_path), {})


def test_a_port_that_is_down_is_left_out_and_named(tmp_path: Path) -> None:
    sys = _tree("roce-two-nics", tmp_path)
    for device in ("mlx5_0", "mlx5_1"):
        (sys / "class/infiniband" / device / "ports/1/state").write_text("1: DOWN\n")
    with pytest.raises(TransportUnavailableError, match=r"mlx5_0:1 is DOWN, mlx5_1:1 is DOWN"):
        find_ports(sys, {})


def _port(name: str, gid: bytes, *, ethernet: bool = True) -> Port:
    return Port(name, 1, 0, gid, ethernet, 100.0, -1)


def _peer(name: str, gid: bytes, *, ethernet: bool = True) -> PeerPort:
    return PeerPort(name, gid, ethernet)


def test_rails_are_paired_in_order() -> None:
    mine = [_port(f"a{i}", V4) for i in range(4)]
    assert choose_lanes(mine, [_peer(f"b{i}", V4) for i in range(4)]) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_more_ports_on_one_side_are_all_used() -> None:
    mine = [_port("a0", V4), _port("a1", V4)]
    assert choose_lanes(mine, [_peer("b", V4)]) == [(0, 0), (1, 0)]
    assert choose_lanes(mine[:1], [_peer("b0", V4), _peer("b1", V4)]) == [(0, 0), (0, 1)]


def test_ports_of_other_fabrics_are_not_paired() -> None:
    subnet, other = b"\xfe\x80" + bytes(14), b"\xfe\x81" + bytes(14)
    mine = [_port("ib", subnet, ethernet=False), _port("roce", V4)]
    assert choose_lanes(mine, [_peer("roce", V4), _peer("ib", subnet, ethernet=False)]) == [(0, 1), (1, 0)]
    with pytest.raises(ConnectError, match="none of ib:1 reaches any of far"):
        choose_lanes(mine[:1], [_peer("far", other, ethernet=False)])
    with pytest.raises(ConnectError, match="different fabrics or GID kinds"):
        choose_lanes(mine[1:], [_peer("v6", LOCAL)])


ADDRESS = VerbsAddress(b"i" * 16, "boot/1", ("10.0.0.1",), 4711, 1 << 40, (7,), (WirePort("rxe0:1", V4, True),))
KEY = VerbsKey(b"i" * 16, b"c" * 16, 1, 1 << 40, 4096, -1, (9,))


def test_blobs_come_back() -> None:
    assert VerbsAddress.unpack(ADDRESS.pack()) == ADDRESS
    assert VerbsKey.unpack(KEY.pack(), 16) == KEY


@pytest.mark.parametrize(
    "change", [{"slot": 16}, {"slot": 0}, {"nbytes": 0}, {"addr": (1 << 63) - 1}, {"rkeys": ()}, {"cookie": b"short"}]
)
def test_forged_keys_are_refused(change: dict[str, object]) -> None:
    forged = msgspec.structs.replace(KEY, **change)
    with pytest.raises(BlobError, match="verbs/key"):
        VerbsKey.unpack(forged.pack(), 16)


def test_forged_addresses_are_refused() -> None:
    with pytest.raises(BlobError, match="1 ports, 2 keys of the table"):
        VerbsAddress.unpack(msgspec.structs.replace(ADDRESS, table_rkeys=(7, 8)).pack())
    with pytest.raises(BlobError, match="malformed"):
        VerbsAddress.unpack(seal("verbs/address", 1, b"\xc1junk"))
    with pytest.raises(BlobError):
        VerbsAddress.unpack(KEY.pack())
