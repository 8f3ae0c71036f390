"""Every check of one host, in the order in which a person would look."""

from __future__ import annotations

from kvrdma.doctor.gpus import check_gpus
from kvrdma.doctor.limits import check_limits
from kvrdma.doctor.network import check_network
from kvrdma.doctor.rdma import check_rdma
from kvrdma.doctor.software import check_software, installed
from kvrdma.doctor.transports import check_transports
from kvrdma.finding import Finding
from kvrdma.host import HostView


def examine(host: HostView) -> list[Finding]:
    """Run all checks of a host.

    What is tried rather than read (transports, look-ups, versions) is left out for a saved tree.
    """
    findings = [*check_rdma(host), *check_gpus(host), *check_limits(host), *check_network(host)]
    if host.live:
        findings += check_software(installed())
    return [*findings, *check_transports(host)]
