"""Each installed transport: can it be opened, what does it say, does a read between two processes work?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import EntryPoint

from kvrdma.bench.choose import Candidates, connect_first
from kvrdma.bench.link import LinkOptions
from kvrdma.bench.patterns import Case, Shape
from kvrdma.bench.spawned_peer import SpawnedPeer
from kvrdma.config import Config
from kvrdma.errors import ConfigError, KVRDMAError, TransportError
from kvrdma.finding import Finding, green, red, yellow
from kvrdma.host import HostView
from kvrdma.transport import Device, installed_transports, open_transport

_PROBE = (Case("fragmented", Shape(1, 16, 4096)),)
_PEER_S = 60.0


def check_transports(host: HostView) -> list[Finding]:
    """Ask each transport for its own checks; on this host also read from a second process by each."""
    findings = _named(host)
    reaches: set[str] = set()
    for name, point in sorted(installed_transports().items()):
        own = _own_checks(name, point, host)
        if host.live:
            found, reach = _opened(name)
            reaches.add(reach)
            better = next((each for each in own if _says_the_same(each, found)), None)
            if better is not None:  # from one who knows more of it
                own.remove(better)
                found = replace(better, check=found.check)
            findings.append(replace(found, found=found.found.removeprefix(f"{name}: ")))
        findings += own
    return findings + (_reached(reaches) if host.live else [])


def _says_the_same(own: Finding, opened: Finding) -> bool:
    """Whether a transport's own check is of what came out when it was opened."""
    return own.found == opened.found or (own.check == opened.check and opened.level != "green")


def _named(host: HostView) -> list[Finding]:
    """Check that KVRDMA_TRANSPORTS names what is installed."""
    try:
        names = Config.from_env(host.environ).transports
    except ConfigError:
        return []  # told with the other settings
    installed = sorted(installed_transports())
    unknown = [name for name in names if name not in installed]
    check = "KVRDMA_TRANSPORTS"
    if not unknown:
        return [green(check, ", ".join(names))] if names else []
    return [
        red(
            check,
            f"{', '.join(unknown)} of {','.join(names)!r} is no transport that is installed",
            "engines, stores and link tests do not start with it",
            f"name some of {', '.join(installed)}, or unset it",
        )
    ]


def _reached(reaches: Iterable[str]) -> list[Finding]:
    """Say how far the transports that work reach together."""
    network = "pip install 'kvrdma[ucx]' for tcp; the system's UCX or an RDMA NIC with libibverbs for RDMA"
    if "network" in reaches:
        return []
    if "host" in reaches:
        why = "engines, stores and link tests work within this host only"
        return [yellow("other hosts", "no transport that works here reaches them", why, network)]
    return [red("transports", "none reaches another process", "engines cannot read from one another", network)]


def _own_checks(name: str, point: EntryPoint, host: HostView) -> list[Finding]:
    """Run ``diagnose(host)`` of the transport's class, where it has one."""
    try:
        diagnose = getattr(point.load(), "diagnose", None)
    except ImportError as error:
        return [red(f"transport {name}", f"cannot be loaded: {error}", "it is installed, but damaged", "reinstall it")]
    if diagnose is None:
        return []
    found: list[Finding] = diagnose(host)
    return found


def _opened(name: str) -> tuple[Finding, str]:
    """Open it and read by it; gives how far it reaches beyond this process, empty where it does not work."""
    check = f"transport {name}"
    try:
        transport = open_transport(name)
    except TransportError as error:
        why, fix = (
            "not usable on this host: others are used",
            "what it says; docs/troubleshooting.md explains each message",
        )
        return yellow(check, str(error), why, fix), ""
    able = transport.capabilities()
    details = ", ".join(f"{key}: {value}" for key, value in able.details.items())
    text = f"reach {able.reach}, memory {'+'.join(sorted(able.memory_kinds))}{'; ' + details if details else ''}"
    if able.reach == "process":
        transport.close()
        return green(check, text), ""
    peer = None
    try:
        peer = SpawnedPeer(Device(), _PEER_S)
        opened = connect_first(Candidates((transport,), ()), peer, _PROBE, LinkOptions())
        via, one_sided, wrong = opened.link.peer.via, opened.link.peer.one_sided, opened.first_mismatch
        opened.link.close()
    except KVRDMAError as error:
        transport.close()
        fix = "what the message says; `kvrdma link-test --transport " + name + "` repeats it"
        return red(check, f"{text}; a read from a second process failed: {error}", "engines cannot use it", fix), ""
    finally:
        if peer is not None:
            peer.close()
    if wrong:
        return red(check, f"{text}; wrong bytes: {wrong}", "answers would be wrong", "report it, with this output"), ""
    kind = "one-sided" if one_sided else "emulated"
    return green(check, f"{text}; a read from a second process went by {via}, {kind}"), able.reach
