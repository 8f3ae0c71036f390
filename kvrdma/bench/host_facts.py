"""What a link test's peer tells of its host."""

from __future__ import annotations

import socket

from kvrdma import __version__, wire
from kvrdma.doctor.rdma import rdma_ports
from kvrdma.doctor.software import installed
from kvrdma.errors import TransportError
from kvrdma.host import HostView
from kvrdma.transport import installed_transports, open_transport


def describe_host(host: HostView | None = None) -> wire.HostDescribed:
    """Describe this host: versions, transports, RDMA ports, MTUs."""
    host = host or HostView()
    opened: dict[str, dict[str, str]] = {}
    refused: dict[str, str] = {}
    for name in sorted(installed_transports()):
        try:
            transport = open_transport(name)
        except TransportError as error:
            refused[name] = str(error)[:16384]
            continue
        opened[name] = {key[:256]: value[:16384] for key, value in transport.capabilities().details.items()}
        transport.close()
    ports = tuple(
        wire.NicPort(port.name, port.state, port.layer, port.rate, port.mtu, port.gid_kind[:256])
        for port in rdma_ports(host)[:256]
    )
    links = host.entries(host.sys / "class/net")[:256]
    mtus = {link.name: max(0, host.number(link / "mtu", 0)) for link in links}
    name = socket.gethostname()[:256]
    return wire.HostDescribed(name, __version__, installed(), opened, refused, ports, mtus)
