"""Bytes that the NICs of a host have carried, as the kernel counts them."""

from __future__ import annotations

from kvrdma.host import HostView

_WORDS = {"port_rcv_data": "received", "port_xmit_data": "sent"}
_BYTES = {"rx_bytes": "received", "tx_bytes": "sent"}


def nic_bytes(host: HostView | None = None) -> dict[str, dict[str, int]]:
    """Give the bytes received and sent by each RDMA port and each network device."""
    host = host or HostView()
    found: dict[str, dict[str, int]] = {}
    for device in host.entries(host.sys / "class/infiniband"):
        for port in host.entries(device / "ports"):
            # The counters of InfiniBand are in words of 4 bytes.
            counts = {name: 4 * host.number(port / "counters" / file, 0) for file, name in _WORDS.items()}
            found[f"{device.name}:{port.name}"] = counts
    for device in host.entries(host.sys / "class/net"):
        found[device.name] = {name: host.number(device / "statistics" / file, 0) for file, name in _BYTES.items()}
    return found


def difference(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Give what came between two looks, without devices that carried nothing."""
    grown = {
        name: {way: count - before.get(name, {}).get(way, 0) for way, count in counts.items()}
        for name, counts in after.items()
    }
    return {name: counts for name, counts in grown.items() if any(counts.values())}
