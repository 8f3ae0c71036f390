"""Ports for what is to be started again at the same place."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_240


def fixed_port(count: int = 1) -> int:
    """Give the first of ``count`` free ports in a row that the system gives to nobody who asks for any port.

    One that was given out so may go to somebody else between an end and the next start: to another test, or to a
    client that tries to connect to it and meets itself.
    """
    highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]) - count
    for _ in range(1000):
        first = random.randrange(_LOWEST, highest)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no free ports")
