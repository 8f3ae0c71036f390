"""`kvrdma doctor --peer`: who answers, does it fit, and reads in both directions."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator

import msgspec
import pytest

from kvrdma import wire
from kvrdma.bench.link import Link, LinkOptions
from kvrdma.bench.link_peer import LinkPeer
from kvrdma.bench.patterns import Case, Shape
from kvrdma.bench.spawned_peer import LocalControl
from kvrdma.config import Config
from kvrdma.doctor.peer import _cure, _failed, _is_near, _missing, _mtus, _ports, _versions, examine_peer
from kvrdma.errors import (
    ConfigError,
    MessageError,
    PeerIdentityError,
    PeerPermissionError,
    ProtocolVersionError,
    UnreachableError,
)
from kvrdma.finding import Finding
from kvrdma.host import HostView
from kvrdma.sidechannel import Endpoint, SideChannelServer
from kvrdma.transport import open_transport

CASE = Case("fragmented", Shape(2, 8, 512))
IB = wire.NicPort("mlx5_0:1", "ACTIVE", "InfiniBand", "400 Gb/sec", 0, "LID 4")
ROCE = wire.NicPort("mlx5_1:1", "ACTIVE", "Ethernet", "100 Gb/sec", 9000, "RoCE v2 IPv4, RoCE v2")


@pytest.fixture
def server() -> Iterator[SideChannelServer]:
    peer = LinkPeer()
    serving = SideChannelServer(Endpoint("127.0.0.1", 0), peer.handle, "a secret of this test")
    yield serving
    serving.close()
    peer.close()


def host(*ports: wire.NicPort, **changes: object) -> wire.HostDescribed:
    plain = wire.HostDescribed("h", "0.1.0", {}, {}, {}, ports, {})
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.needs("ucx")
def test_a_peer_is_read_in_both_directions_by_each_transport(server: SideChannelServer) -> None:
    config = Config(secret="a secret of this test")
    findings = {finding.check: finding for finding in examine_peer(HostView(), server.endpoint, config)}
    assert {finding.level for finding in findings.values()} <= {"green", "yellow"}, findings
    assert "path MTU" in findings["peer"].found
    reads = findings["peer by ucx"].found
    assert "reads from there by" in reads
    assert "reads from here by" in reads
    assert "peer by memory" not in findings, "it reaches no other process by its nature"


def test_nobody_there_or_another_secret_is_red_and_each_has_its_own_cure(server: SideChannelServer) -> None:
    for secret in ("quite another secret", None):
        (finding,) = examine_peer(HostView(), server.endpoint, Config(secret=secret))
        assert finding.level == "red"
        assert "KVRDMA_SECRET" in finding.found
        assert "export the same KVRDMA_SECRET here and there" in finding.fix
        assert "open the port" not in finding.fix
    endpoint = server.endpoint
    server.close()
    (finding,) = examine_peer(HostView(), endpoint, Config(control_timeout_s=0.2))
    assert "nobody listens" in finding.found
    assert "start `kvrdma link-test serve" in finding.fix
    assert "KVRDMA_SECRET" not in finding.fix


def test_where_something_else_listens_the_port_is_to_be_corrected() -> None:
    def store(message: wire.Message) -> wire.Message:
        raise MessageError("a store listens here")

    serving = SideChannelServer(Endpoint("127.0.0.1", 0), store)
    (finding,) = examine_peer(HostView(), serving.endpoint, Config())
    serving.close()
    assert "give the port of a `kvrdma link-test serve`" in finding.fix
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = Endpoint("127.0.0.1", other.getsockname()[1])
        (finding,) = examine_peer(HostView(), endpoint, Config(control_timeout_s=0.2))
    assert "give the port of a `kvrdma link-test serve`" in finding.fix


def test_other_faults_of_a_peer_have_their_cures() -> None:
    assert "same kvrdma" in _cure(ProtocolVersionError("it speaks control protocol 9"))
    assert "correct the name" in _cure(UnreachableError("host 'x' cannot be looked up"))
    assert "said last" in _cure(UnreachableError("x gave no answer within 5 s"))
    assert "run kvrdma doctor" in _cure(ConfigError("a pool was asked for"))


def test_a_transport_that_one_side_lacks_is_looked_up_by_name() -> None:
    here, there = (_missing("verbs", side, host(IB, refused={"verbs": "no port"})) for side in ("here", "there"))
    assert (here.level, here.found) == ("yellow", "not here: no port")
    assert "`transport verbs` of the kvrdma doctor above" in here.fix
    assert "`transport verbs` of the kvrdma doctor that runs there" in there.fix
    assert _missing("verbs", "there", host()).level == "green", "no device there is no fault"


def test_a_transport_of_one_host_is_not_blamed_for_a_peer_on_another() -> None:
    elsewhere = _failed("peer by cma", "host", PeerIdentityError("process 1 runs on another host"))
    assert elsewhere.found == "not between hosts: it reads within one host only, and the peer is on another"
    assert _is_near(elsewhere)
    denied = _failed("peer by cma", "host", PeerPermissionError("the memory of 1 cannot be read"))
    assert not _is_near(denied)
    assert "ptrace" in denied.fix


def levels(found: list[Finding]) -> list[str]:
    return [finding.level for finding in found]


def test_ports_that_cannot_meet_are_red() -> None:
    assert levels(_ports(host(IB), host(IB))) == ["green"]
    assert levels(_ports(host(), host())) == []
    (finding,) = _ports(host(IB), host())
    assert (finding.level, finding.found) == ("yellow", "no active RDMA port there")
    (finding,) = _ports(host(IB), host(ROCE))
    assert (finding.level, finding.found) == ("red", "InfiniBand here, Ethernet there")
    (finding,) = _ports(host(ROCE), host(msgspec.structs.replace(ROCE, mtu=1500)))
    assert (finding.level, finding.found) == ("red", "MTU [9000] here, [1500] there")
    (finding,) = _ports(host(ROCE), host(msgspec.structs.replace(ROCE, gids="IB/RoCE v1")))
    assert finding.level == "red"
    assert "ibv_create_ah" in finding.why
    assert levels(_ports(host(msgspec.structs.replace(IB, state="DOWN")), host())) == []


def test_versions_that_differ_are_told() -> None:
    here = host(transports={"x": {"version": "1.22.0", "library": "/a"}}, versions={"vllm": "0.32.0"})
    there = host(transports={"x": {"version": "1.13.1", "library": "/b"}}, versions={"vllm": "0.33.0"})
    first, second = _versions(here, there)
    assert (first.level, first.found) == ("red", "x: 1.22.0 here, 1.13.1 there")
    assert second.found == "vllm 0.32.0 here, 0.33.0 there"
    patch = host(transports={"x": {"version": "1.22.1"}}, versions={"vllm": "0.32.0"})
    assert levels(_versions(here, patch)) == ["yellow"]
    assert levels(_versions(here, here)) == ["green"]


def test_an_mtu_that_no_device_there_has_is_told() -> None:
    there = host(mtus={"lo": 65536, "eth0": 1500})
    assert _mtus(65535, there) == []
    assert _mtus(1500, there) == []
    (finding,) = _mtus(9000, there)
    assert (finding.level, finding.found) == ("yellow", "9000 on the way there, [1500] on the devices there")


def test_the_peer_reads_back_what_this_side_holds() -> None:
    peer = LinkPeer()
    link = Link(LocalControl(peer), open_transport("memory"), CASE.shape.pool_nbytes, LinkOptions())
    for _ in range(2):
        times, wrong = link.read_and_verify(CASE)
        assert wrong is None
        back = link.pull_back(CASE)
        assert (back.mismatch, back.rows_posted) == ("", times.rows_posted)
        assert 0 < back.blocking_s <= back.total_s
    large = dataclasses.replace(CASE, shape=Shape(4, 8, 512))
    with pytest.raises(ConfigError, match="a case of 32768 bytes was asked for, the pool has 16384"):
        link.pull_back(large)
    peer.close()
    link.close()


def test_wrong_bytes_are_seen_by_the_peer() -> None:
    peer = LinkPeer()
    link = Link(LocalControl(peer), open_transport("memory"), CASE.shape.pool_nbytes, LinkOptions())
    fill = link.pool.fill

    def fill_and_damage(generation: int) -> None:
        fill(generation)
        link.pool.host_bytes()[:] ^= 1

    link.pool.fill = fill_and_damage  # type: ignore[method-assign]
    assert "is wrong at local byte" in link.pull_back(CASE).mismatch
    peer.close()
    link.close()
