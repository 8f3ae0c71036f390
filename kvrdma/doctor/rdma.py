"""RDMA ports of a host: are they up, how fast, which addresses, what MTU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvrdma.doctor.pci import PciDevice, pci_device, pci_devices
from kvrdma.finding import Finding, green, red, yellow
from kvrdma.host import HostView

_MELLANOX, _INFINIBAND, _ETHERNET = 0x15B3, 0x0207, 0x0200
_GOOD_MTU = 4200
"""Of Ethernet: the least that carries RoCE packets of 4096 bytes."""


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table of addresses."""

    index: int
    kind: str
    """``"RoCE v2"``, ``"IB/RoCE v1"``."""
    value: str

    @property
    def is_ipv4(self) -> bool:
        """Whether it stands for an IPv4 address."""
        return self.value.startswith("0000:0000:0000:0000:0000:ffff:")


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA NIC."""

    device: str
    number: int
    state: str
    layer: str
    """``"InfiniBand"`` or ``"Ethernet"`` (RoCE)."""
    rate_gbit: float
    rate: str
    lid: int
    gids: tuple[Gid, ...]
    netdev: str
    mtu: int
    """Of the network device, in bytes; 0: unknown."""
    pci: PciDevice | None

    @property
    def name(self) -> str:
        """As UCX names it: ``mlx5_0:1``."""
        return f"{self.device}:{self.number}"

    @property
    def active(self) -> bool:
        """Whether data can pass."""
        return self.state == "ACTIVE"

    @property
    def gid_kind(self) -> str:
        """For people: what its addresses are."""
        if self.layer == "InfiniBand":
            return f"LID {self.lid}"
        kinds = sorted({f"{gid.kind}{' IPv4' if gid.is_ipv4 else ''}" for gid in self.gids})
        return ", ".join(kinds) or "no GID"


def rdma_ports(host: HostView) -> list[RdmaPort]:
    """List the ports of all RDMA NICs."""
    return [
        _port(host, device, port)
        for device in host.entries(host.sys / "class/infiniband")
        for port in host.entries(device / "ports")
    ]


def _port(host: HostView, device: Path, port: Path) -> RdmaPort:
    state, rate = host.text(port / "state"), host.text(port / "rate")
    netdevs = [entry.name for entry in host.entries(device / "device/net")]
    gbit = re.match(r"[0-9.]+", rate)
    return RdmaPort(
        device.name,
        int(port.name),
        state.partition(":")[2].strip() or state,
        host.text(port / "link_layer") or "InfiniBand",
        float(gbit[0]) if gbit else 0.0,
        rate,
        host.number(port / "lid", 0),
        _gids(host, port),
        netdevs[0] if netdevs else "",
        host.number(host.sys / "class/net" / netdevs[0] / "mtu", 0) if netdevs else 0,
        pci_device(host, device / "device"),
    )


def _gids(host: HostView, port: Path) -> tuple[Gid, ...]:
    found = []
    for entry in host.entries(port / "gids"):
        value = host.text(entry)
        if value.replace(":", "").strip("0"):
            kind = host.text(port / "gid_attrs/types" / entry.name)
            found.append(Gid(int(entry.name), kind, value))
    return tuple(found)


def check_rdma(host: HostView) -> list[Finding]:
    """Check every port and the rights to use it."""
    ports = rdma_ports(host)
    if not ports:
        return [_none(host)]
    findings = [_ports(ports), *_states(ports), *_addresses(ports), *_mtus(ports), *_bonds(ports), *_lanes(ports)]
    return [*findings, *_rights(host)]


def _none(host: HostView) -> Finding:
    cards = [d for d in pci_devices(host) if _is_nic(d)]
    why = "without RDMA reads to other hosts go over tcp, and the CPU of the peer serves them"
    if cards:
        return red(
            "rdma nics",
            f"none, although {', '.join(card.address for card in cards)} could be",
            why,
            "load its RDMA driver (modprobe mlx5_ib) and install rdma-core; in a container also pass --device "
            "/dev/infiniband and run in the host's network namespace",
        )
    return yellow(
        "rdma nics",
        "none",
        why,
        "in a virtual machine: have a virtual function (SR-IOV) passed in; in Kubernetes: ask for the resource of the "
        "RDMA device plugin (rdma/...); else the link test over tcp tells what this network can do",
    )


def _is_nic(device: PciDevice) -> bool:
    kind = device.device_class >> 8
    return kind == _INFINIBAND or (device.vendor == _MELLANOX and kind == _ETHERNET)


def _ports(ports: list[RdmaPort]) -> Finding:
    texts = [f"{port.name} {port.state} {port.layer} {port.rate or 'no rate'}" for port in ports]
    return green("rdma nics", "; ".join(texts))


def _states(ports: list[RdmaPort]) -> list[Finding]:
    down = [port for port in ports if not port.active]
    check = "rdma port state"
    if not down:
        rates = sorted({port.rate_gbit for port in ports})
        mixed = f"; rates differ: {', '.join(f'{rate:g}' for rate in rates)} Gbit/s" if len(rates) > 1 else ""
        return [green(check, f"all {len(ports)} active{mixed}")]
    names = ", ".join(f"{port.name} is {port.state}" for port in down)
    why = "a port that is not ACTIVE carries nothing; UCX leaves it out without a word"
    fix = "DOWN: check cable, switch port and `ip link set DEV up`; INIT: no subnet manager has seen it (start opensm)"
    return [red(check, names, why, fix) if len(down) == len(ports) else yellow(check, names, why, fix)]


def _addresses(ports: list[RdmaPort]) -> list[Finding]:
    check, found = "rdma addresses", []
    for port in (port for port in ports if port.active):
        if port.layer == "InfiniBand" and not port.lid:
            found.append(
                red(check, f"{port.name} has LID 0", "no subnet manager has given it an address", "start opensm")
            )
        if port.layer == "Ethernet" and not any(gid.kind == "RoCE v2" and gid.is_ipv4 for gid in port.gids):
            found.append(
                yellow(
                    check,
                    f"{port.name} has {port.gid_kind}",
                    "RoCE between hosts is routed by a RoCE v2 GID of an IP address: without one peers answer "
                    "'ibv_create_ah failed' or time out",
                    f"give {port.netdev or 'its network device'} an IPv4 address, and look at "
                    f"/sys/class/infiniband/{port.device}/ports/{port.number}/gid_attrs",
                )
            )
    return found or [green(check, "; ".join(f"{port.name} {port.gid_kind}" for port in ports))]


def _mtus(ports: list[RdmaPort]) -> list[Finding]:
    small = [port for port in ports if port.layer == "Ethernet" and 0 < port.mtu < _GOOD_MTU]
    if not small:
        known = [f"{port.netdev} {port.mtu}" for port in ports if port.mtu]
        return [green("rdma mtu", ", ".join(known))] if known else []
    return [
        yellow(
            "rdma mtu",
            ", ".join(f"{port.name} ({port.netdev}) {port.mtu}" for port in small),
            f"RoCE packets carry 1024 bytes under an MTU of 1500 and 4096 from {_GOOD_MTU} on; both ends and "
            "each switch must agree",
            "; ".join(f"ip link set {port.netdev} mtu 9000" for port in small) + " (on both hosts and the switch)",
        )
    ]


def _bonds(ports: list[RdmaPort]) -> list[Finding]:
    bonds = [port for port in ports if "bond" in port.device]
    if not bonds:
        return []
    names = ", ".join(port.name for port in bonds)
    return [green("rdma bonds", f"{names}: one device for both of its links; one connection uses one of them")]


def _lanes(ports: list[RdmaPort]) -> list[Finding]:
    slow = {port.device: port.pci.speed for port in ports if port.pci and port.pci.speed}
    if not slow:
        return []
    return [
        yellow(
            "pci link of nics",
            ", ".join(f"{device}: {speed}" for device, speed in slow.items()),
            "the NIC cannot be faster than its slot",
            "reseat the card or move it to a slot of its full width; check the BIOS setting of the slot",
        )
    ]


def _rights(host: HostView) -> list[Finding]:
    folder = host.dev / "infiniband"
    wanted = [entry.name for entry in host.entries(host.sys / "class/infiniband_verbs") if "uverbs" in entry.name]
    missing = [name for name in wanted if not (folder / name).exists()]
    if not missing:
        return [green("rdma device files", f"{len(wanted)} in {folder}")] if wanted else []
    return [
        red(
            "rdma device files",
            f"{', '.join(missing)} missing in {folder}",
            "sysfs shows the NICs, but nothing can open them: UCX falls back to tcp without a word",
            "container: --device /dev/infiniband (or --privileged); Kubernetes: ask for the resource of the RDMA "
            "device plugin; else load ib_uverbs",
        )
    ]
