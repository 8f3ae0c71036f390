"""What an engine opens and refuses before it starts, and what it says about that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvrdma.config import Config
from kvrdma.engine.links import PeerEngine
from kvrdma.errors import ConfigError, TransportError
from kvrdma.memory import devices_of
from kvrdma.transport import Transport, installed_transports, open_transport


def open_transports(config: Config) -> tuple[list[Transport], dict[str, str]]:
    """Open the transports that are set, or all that work here and reach beyond this process.

    Returns:
        The transports, and the others by name with the reason.

    Raises:
        TransportError: one that is set does not work.
        ConfigError: none works.
    """
    opened: list[Transport] = []
    refused: dict[str, str] = {}
    for name in config.transports or sorted(installed_transports()):
        try:
            transport = open_transport(name, require_one_sided=config.require_one_sided)
        except TransportError as error:
            if config.transports:
                for other in opened:
                    other.close()
                raise
            refused[name] = str(error)
            continue
        if transport.capabilities().reach == "process" and not config.transports:
            transport.close()
        else:
            opened.append(transport)
    if not opened:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ConfigError(f"no transport works here: {reasons}")
    return opened, refused


def refuse_digests(config: Config, caches: Mapping[str, Any]) -> None:
    """Checksums are made by the CPU.

    Raises:
        ConfigError: ``verify="digest"`` and a cache is not in host memory.
    """
    elsewhere = {str(device) for _, device in devices_of(caches) if device.kind != "cpu"}
    if config.verify == "digest" and elsewhere:
        raise ConfigError(f"KVRDMA_VERIFY=digest needs caches in host memory: they are on {', '.join(elsewhere)}")


def transport_lines(
    transports: Mapping[str, Transport], refused: Mapping[str, str], peers: Iterable[PeerEngine]
) -> list[str]:
    """Describe for people what is open, what is not and why, and how each peer is read."""
    lines = []
    for name, transport in transports.items():
        able = transport.capabilities()
        kind = "one-sided" if able.one_sided else "served by the peer's CPU"
        details = ", ".join(f"{key} {value}" for key, value in able.details.items())
        lines.append(f"  transport {name}: {kind}, reach {able.reach}{', ' + details if details else ''}")
    lines += [f"  transport {name}: refused: {why}" for name, why in refused.items()]
    lines += [f"  peer {peer.key.engine_id}: {' | '.join(peer.why)}" for peer in peers]
    return lines
