"""Which ports of which RDMA NICs to use, and which of ours reads which of the peer's: rules over what sysfs says."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvrdma.errors import ConfigError, ConnectError, TransportUnavailableError

SYSFS = Path("/sys")
MAX_PORTS = 8
_SIOCGIFADDR, _IFREQ = 0x8915, struct.Struct("256s")
_MAPPED = bytes(10) + b"\xff\xff"
_LINK_LOCAL = b"\xfe\x80"


@dataclass(frozen=True, slots=True)
class Port:
    """One active port and the GID by which it is reached."""

    device: str
    number: int
    gid_index: int
    gid: bytes
    """16 bytes; the first 8 are the subnet on InfiniBand."""
    ethernet: bool
    gbps: float
    numa_node: int
    """-1: unknown."""

    @property
    def name(self) -> str:
        """``mlx5_0:1``."""
        return f"{self.device}:{self.number}"

    @property
    def host(self) -> str | None:
        """The IP address of a RoCE port, where it can be reached without a scope."""
        if not self.ethernet or self.gid[:2] == _LINK_LOCAL:
            return None
        mapped = self.gid[:12] == _MAPPED
        return str(ipaddress.IPv4Address(self.gid[12:]) if mapped else ipaddress.IPv6Address(self.gid))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _gid_rank(kind: str, gid: bytes) -> int:
    """Order GIDs of an Ethernet port: RoCE v2 routes, and a mapped IPv4 address is what hosts are known by."""
    version = 0 if kind.lower() == "roce v2" else 10
    return version + (0 if gid[:12] == _MAPPED else 2 if gid[:2] == _LINK_LOCAL else 1)


def choose_gid(port: Path, *, ethernet: bool, wanted: int | None) -> tuple[int, bytes]:
    """Give index and value of the GID to use.

    Args:
        port: its folder in sysfs.
        ethernet: RoCE, where it matters; InfiniBand uses the first.
        wanted: an index that was asked for.

    Raises:
        TransportUnavailableError: the port has none, or not the one that was asked for.
    """
    found: dict[int, tuple[int, bytes]] = {}
    for path in (port / "gids").glob("*"):
        index = int(path.name)
        with suppress(ValueError):
            gid = bytes.fromhex(_text(path).replace(":", ""))
            if any(gid):
                found[index] = (_gid_rank(_text(port / "gid_attrs/types" / path.name), gid) if ethernet else 0, gid)
    if wanted is not None:
        found = {index: each for index, each in found.items() if index == wanted}
    if not found:
        which = "no GID" if wanted is None else f"no GID {wanted} (KVRDMA_VERBS_GID_INDEX)"
        raise TransportUnavailableError(
            f"verbs: {port.parent.parent.name}:{port.name} has {which}: give its netdev an IP"
        )
    index = min(found, key=lambda i: (found[i][0], i))
    return index, found[index][1]


def _bound_node(root: Path) -> int | None:
    """The NUMA node that this process is bound to, if it is just one of several."""
    mine = os.sched_getaffinity(0)
    nodes = {}
    for path in (root / "devices/system/node").glob("node[0-9]*"):
        cpus: set[int] = set()
        for part in filter(None, _text(path / "cpulist").split(",")):
            low, _, high = part.partition("-")
            cpus.update(range(int(low), int(high or low) + 1))
        nodes[int(path.name[4:])] = cpus
    inside = [node for node, cpus in nodes.items() if cpus and mine <= cpus]
    return inside[0] if len(nodes) > 1 and len(inside) == 1 else None


def find_ports(root: Path = SYSFS, environ: Mapping[str, str] | None = None) -> list[Port]:
    """List the ports to use, best first.

    Those that ``KVRDMA_VERBS_DEVICES`` names (``mlx5_0``, ``mlx5_1:1``, by commas), in that order; else all active ones
    that are as fast as the fastest, of the NUMA node that this process is bound to where it has any.

    Raises:
        ConfigError: a setting is malformed, or names what is not there.
        TransportUnavailableError: there is no active port; says what was found.
    """
    environ = os.environ if environ is None else environ
    index_text = environ.get("KVRDMA_VERBS_GID_INDEX", "")
    if index_text and not index_text.isdecimal():
        raise ConfigError(f"KVRDMA_VERBS_GID_INDEX={index_text!r}: use a number")
    wanted = int(index_text) if index_text else None
    names = [name.strip() for name in environ.get("KVRDMA_VERBS_DEVICES", "").split(",") if name.strip()]
    ports: list[Port] = []
    down: list[str] = []
    for path in sorted((root / "class/infiniband").glob("*/ports/*")):
        name = f"{path.parent.parent.name}:{path.name}"
        state = _text(path / "state")
        if names and name not in names and path.parent.parent.name not in names:
            continue
        if not state.endswith("ACTIVE"):
            down.append(f"{name} is {state.partition(': ')[2] or 'unreadable'}")
            continue
        ports.append(_port(path, wanted))
    missing = [n for n in names if not any(n in (p.name, p.device) for p in ports) and not any(n in d for d in down)]
    if missing:
        raise ConfigError(f"KVRDMA_VERBS_DEVICES names {', '.join(missing)}, which this host does not have")
    if not ports:
        raise TransportUnavailableError(
            f"verbs: no active RDMA port here ({', '.join(down) or 'no RDMA device at all'})"
        )
    if names:
        order = {name: place for place, name in reversed(list(enumerate(names)))}
        return sorted(ports, key=lambda p: order.get(p.name, order.get(p.device, 0)))[:MAX_PORTS]
    return _best(ports, _bound_node(root))


def _port(path: Path, wanted: int | None) -> Port:
    device = path.parent.parent
    ethernet = _text(path / "link_layer") == "Ethernet"
    index, gid = choose_gid(path, ethernet=ethernet, wanted=wanted if ethernet else None)
    rate = re.match(r"[\d.]+", _text(path / "rate"))
    node = _text(device / "device/numa_node")
    return Port(
        device=device.name,
        number=int(path.name),
        gid_index=index,
        gid=gid,
        ethernet=ethernet,
        gbps=float(rate[0]) if rate else 0.0,
        numa_node=int(node) if node.lstrip("-").isdecimal() else -1,
    )


def _best(ports: Sequence[Port], node: int | None) -> list[Port]:
    fastest = max(port.gbps for port in ports)
    fast = [port for port in ports if port.gbps == fastest]
    near = [port for port in fast if node is not None and port.numa_node == node]
    return (near or fast)[:MAX_PORTS]


@dataclass(frozen=True, slots=True)
class PeerPort:
    """What a peer says of one of its ports."""

    name: str
    gid: bytes
    ethernet: bool


def same_fabric(mine: Port, theirs: PeerPort) -> bool:
    """Whether two ports can reach one another, as far as their GIDs tell."""
    if mine.ethernet != theirs.ethernet:
        return False
    if mine.ethernet:
        return (mine.gid[:12] == _MAPPED) == (theirs.gid[:12] == _MAPPED)
    return mine.gid[:8] == theirs.gid[:8]


def choose_lanes(mine: Sequence[Port], theirs: Sequence[PeerPort]) -> list[tuple[int, int]]:
    """Pair ports, so that each port of either side that fits another has a lane: the n-th with the n-th, as rails are.

    Returns:
        (index in ``mine``, index in ``theirs``) for each lane.

    Raises:
        ConnectError: no port of one side can reach one of the other.
    """
    here = [i for i, port in enumerate(mine) if any(same_fabric(port, other) for other in theirs)]
    lanes = []
    for place in range(max(len(here), len(theirs)) if here else 0):
        i = here[place % len(here)]
        there = [j for j, other in enumerate(theirs) if same_fabric(mine[i], other)]
        lanes.append((i, there[place % len(there)]))
    if not lanes:
        raise ConnectError(
            f"verbs: none of {', '.join(port.name for port in mine)} reaches any of "
            f"{', '.join(port.name for port in theirs) or 'no port'}: they are of different fabrics or GID kinds"
        )
    return sorted(set(lanes))


def own_hosts(ports: Sequence[Port]) -> list[str]:
    """List addresses of this host for the TCP connection that joins queue pairs, those of the ports first."""
    hosts = [host for host in (port.host for port in ports) if host]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, _IFREQ.pack(name.encode()[:15]))
                hosts.append(socket.inet_ntoa(answer[20:24]))
    return list(dict.fromkeys(host for host in hosts if not host.startswith("127.")))
