"""Where devices sit on the PCI buses, and how far two of them are from one another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvrdma.host import HostView

_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4}:[0-9a-f]{2}")
NEAR = ("PIX", "PXB", "PHB")
"""Distances within one CPU socket's part of the bus."""
_ORDER = (*NEAR, "NODE", "SYS")


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One function of a PCI device."""

    address: str
    path: tuple[str, ...]
    """The host bridge and each bridge down to the device itself."""
    numa: int
    """-1: the host has one node only, or does not say."""
    vendor: int
    device_class: int
    speed: str
    """Current and greatest, where the current one is less: ``"8.0 GT/s x8 of 32.0 GT/s x16"``."""


def pci_device(host: HostView, folder: Path) -> PciDevice | None:
    """Read the device whose folder (or link to it) in sysfs this is; None if it is none of PCI."""
    parts = folder.resolve().parts
    path = tuple(part for part in parts if _ADDRESS.fullmatch(part) or _ROOT.fullmatch(part))
    if not path or not _ADDRESS.fullmatch(path[-1]):
        return None
    return PciDevice(
        path[-1],
        path,
        host.number(folder / "numa_node"),
        host.number(folder / "vendor", 0),
        host.number(folder / "class", 0),
        _degraded(host, folder),
    )


def pci_devices(host: HostView) -> list[PciDevice]:
    """List all, by address."""
    found = (pci_device(host, folder) for folder in host.entries(host.sys / "bus/pci/devices"))
    return [device for device in found if device is not None]


def distance(one: PciDevice, other: PciDevice) -> str:
    """Name the distance as ``nvidia-smi topo`` does.

    PIX: one bridge between them. PXB: several. PHB: one host bridge. NODE: one NUMA node. SYS: across sockets.
    """
    common = 0
    while common < min(len(one.path), len(other.path)) and one.path[common] == other.path[common]:
        common += 1
    if common > 1:
        # Below a common bridge each side has its own port of the switch; more are further switches.
        return "PIX" if max(len(one.path), len(other.path)) - common <= 2 else "PXB"
    if common == 1:
        return "PHB"
    return "NODE" if one.numa == other.numa else "SYS"


def rank_of(name: str) -> int:
    """Order distances: 0 is the nearest."""
    return _ORDER.index(name)


def _degraded(host: HostView, folder: Path) -> str:
    speed, most = host.text(folder / "current_link_speed"), host.text(folder / "max_link_speed")
    width, widest = host.number(folder / "current_link_width", 0), host.number(folder / "max_link_width", 0)
    if not (speed and most and width and widest):
        return ""
    if _gts(speed) >= _gts(most) and width >= widest:
        return ""
    return f"{speed.removesuffix(' PCIe')} x{width} of {most.removesuffix(' PCIe')} x{widest}"


def _gts(text: str) -> float:
    match = re.match(r"[0-9.]+", text)
    return float(match[0]) if match else 0.0
