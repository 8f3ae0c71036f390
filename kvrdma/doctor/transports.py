"""Each installed transport: can it be opened, what does it say, does a read between two processes work?"""

from __future__ import annotations

from importlib.metadata import EntryPoint

from kvrdma.bench.choose import Candidates, connect_first
from kvrdma.bench.link import LinkOptions
from kvrdma.bench.patterns import Case, Shape
from kvrdma.bench.spawned_peer import SpawnedPeer
from kvrdma.errors import KVRDMAError, TransportError
from kvrdma.finding import Finding, green, red, yellow
from kvrdma.host import HostView
from kvrdma.transport import Device, installed_transports, open_transport

_PROBE = (Case("fragmented", Shape(1, 16, 4096)),)
_PEER_S = 60.0


def check_transports(host: HostView) -> list[Finding]:
    """Ask each transport for its own checks; on this host also read from a second process by each."""
    findings: list[Finding] = []
    usable = 0
    for name, point in sorted(installed_transports().items()):
        if host.live:
            found, works = _opened(name)
            findings.append(found)
            usable += works
        findings += _own_checks(name, point, host)
    if host.live and not usable:
        findings.append(
            red(
                "transports",
                "none reaches another process",
                "engines cannot read from one another",
                "pip install 'kvrdma[ucx]', or install the system's UCX",
            )
        )
    return findings


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


def _opened(name: str) -> tuple[Finding, bool]:
    check = f"transport {name}"
    try:
        transport = open_transport(name)
    except TransportError as error:
        why = "it is installed, but cannot be used here"
        return yellow(check, str(error), why, "see what it says; other transports are used instead"), False
    able = transport.capabilities()
    details = ", ".join(f"{key}: {value}" for key, value in able.details.items())
    text = f"reach {able.reach}, memory {'+'.join(sorted(able.memory_kinds))}{'; ' + details if details else ''}"
    if able.reach == "process":
        transport.close()
        return green(check, text), False
    peer = None
    try:
        peer = SpawnedPeer(Device(), _PEER_S)
        opened = connect_first(Candidates((transport,), ()), peer, _PROBE, LinkOptions())
        via, one_sided, wrong = opened.link.peer.via, opened.link.peer.one_sided, opened.first_mismatch
        opened.link.close()
    except KVRDMAError as error:
        transport.close()
        fix = "what the message says; `kvrdma link-test --transport " + name + "` repeats it"
        return red(check, f"{text}; a read from a second process failed: {error}", "engines cannot use it", fix), False
    finally:
        if peer is not None:
            peer.close()
    if wrong:
        return red(
            check, f"{text}; wrong bytes: {wrong}", "answers would be wrong", "report it, with this output"
        ), False
    kind = "one-sided" if one_sided else "emulated"
    return green(check, f"{text}; a read from a second process went by {via}, {kind}"), True
