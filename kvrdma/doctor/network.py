"""What peers are told, and whether the ports are free."""

from __future__ import annotations

import ctypes
import socket

from kvrdma.config import Config, unknown_settings
from kvrdma.errors import ConfigError, UnreachableError
from kvrdma.finding import Finding, green, red, yellow
from kvrdma.host import HostView
from kvrdma.sidechannel import Endpoint

_LISTEN = "0A"
_RANKS = 8
"""Ports looked at from the configured one on: data-parallel ranks take one each."""


def check_network(host: HostView) -> list[Finding]:
    """Check the settings of the control channel, the ports and the clock."""
    try:
        config = Config.from_env(host.environ)
        bind = Endpoint.parse(config.bind)
    except ConfigError as error:
        return [red("settings", str(error), "nothing starts with it", "correct or unset the variable"), _clock(host)]
    found = [_advertised(host, config, bind), _ports(host, bind), _secret(config), *_links(host), _clock(host)]
    return [*map(_unknown, unknown_settings(host.environ)), *found]


def _unknown(name: str) -> Finding:
    why = "what it was to set keeps its default"
    return yellow("settings", f"{name} is no setting of kvrdma", why, "correct its name, or unset it")


def _advertised(host: HostView, config: Config, bind: Endpoint) -> Finding:
    told = config.advertise or bind.host
    check = "address peers are told"
    try:
        addresses = (
            Endpoint(told, bind.port).resolve() if host.live or _is_literal(told) else _from_hosts_file(host, told)
        )
    except UnreachableError as error:
        return red(
            check, str(error), "peers cannot look it up either", "set KVRDMA_ADVERTISE to an address of this host"
        )
    text = f"{told}{'' if (told,) == addresses else f' ({chr(32).join(addresses)})'}"
    if any(address in ("0.0.0.0", "::") for address in addresses):  # noqa: S104 - compared, not bound
        return red(
            check,
            f"{text}: every address",
            "no peer can connect to it",
            "set KVRDMA_ADVERTISE to the address by which peers reach this host",
        )
    if any(address.startswith("127.") or address == "::1" for address in addresses):
        return yellow(
            check,
            f"{text}: loopback",
            "peers on other hosts would connect to themselves; fine while both engines are on this host",
            "KVRDMA_BIND=ADDRESS:PORT with an address of this host (and KVRDMA_SECRET), or KVRDMA_ADVERTISE; a name "
            "that /etc/hosts maps to 127.0.1.1 does not do",
        )
    return green(check, text)


def _is_literal(text: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, text)
        except OSError:
            continue
        return True
    return False


def _from_hosts_file(host: HostView, name: str) -> tuple[str, ...]:
    """Look a name up in the ``/etc/hosts`` beside a saved ``/proc``."""
    for line in host.text(host.proc.parent / "etc/hosts").splitlines():
        words = line.partition("#")[0].split()
        if name in words[1:]:
            return (words[0],)
    raise UnreachableError(f"host {name!r} cannot be looked up in the saved tree")


def _ports(host: HostView, bind: Endpoint) -> Finding:
    check = "ports"
    if not bind.port:
        return green(check, "chosen by the system (KVRDMA_BIND has port 0)")
    taken = sorted(_listening(host) & set(range(bind.port, bind.port + _RANKS)))
    span = host.text(host.proc / "sys/net/ipv4/ip_local_port_range").split()
    if taken:
        return red(
            check,
            f"{', '.join(map(str, taken))} in use, wanted {bind.port} to {bind.port + _RANKS - 1}",
            "data-parallel rank n listens at the port of KVRDMA_BIND + n; one that is taken ends that rank",
            f"choose a range that is free (ss -ltnp shows who has {taken[0]})",
        )
    if len(span) == 2 and int(span[0]) <= bind.port <= int(span[1]):
        return yellow(
            check,
            f"{bind.port} is among {span[0]}-{span[1]}, which outgoing connections use",
            "any program may hold it when the engine starts",
            f"choose a port below {span[0]}, or reserve it: sysctl net.ipv4.ip_local_reserved_ports={bind.port}",
        )
    return green(check, f"{bind.port} to {bind.port + _RANKS - 1} are free")


def _listening(host: HostView) -> set[int]:
    found = set()
    for name in ("net/tcp", "net/tcp6"):
        for line in host.text(host.proc / name).splitlines()[1:]:
            words = line.split()
            if len(words) > 3 and words[3] == _LISTEN:
                found.add(int(words[1].rpartition(":")[2], 16))
    return found


def _secret(config: Config) -> Finding:
    if config.secret:
        return green("secret", "set: control messages are authenticated and encrypted")
    return yellow(
        "secret",
        "KVRDMA_SECRET is not set",
        "whoever reaches the control port gets the keys to all KV memory; listening beyond loopback is refused",
        "export KVRDMA_SECRET=$(openssl rand -hex 32), the same on all hosts",
    )


def _links(host: HostView) -> list[Finding]:
    """Look at bonds and their members."""
    found = []
    for bond in host.entries(host.sys / "class/net"):
        members = host.text(bond / "bonding/slaves").split()
        if not members:
            continue
        down = [name for name in members if host.text(host.sys / "class/net" / name / "operstate") == "down"]
        mode = host.text(bond / "bonding/mode").partition(" ")[0]
        text = f"{bond.name}: {mode} of {', '.join(members)}"
        if down:
            found.append(
                yellow(
                    "bond",
                    f"{text}; {', '.join(down)} down",
                    "half of the bandwidth and no reserve",
                    f"check cable and switch port; ip link set {down[0]} up",
                )
            )
        else:
            found.append(green("bond", text))
    return found


class _Timex(ctypes.Structure):
    """The start of ``struct timex``; the kernel fills all of it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


def _clock(host: HostView) -> Finding:
    source = host.text(host.sys / "devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    if source in ("hpet", "acpi_pm", "jiffies"):
        return yellow(
            "clock",
            f"clock source {source}",
            "reading the time costs a microsecond or more, and deadlines are looked up often",
            "boot without clocksource=..., or with tsc=reliable where the TSC is sound",
        )
    # Leases are counted by the producer's clock alone: a difference between hosts cannot make a stale read valid.
    synced = ""
    if host.live:
        times = _Timex()
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(times))
        synced = ", not synchronised (matters for comparing logs only)" if state == 5 else ", synchronised"
    return green("clock", f"clock source {source}{synced}")
