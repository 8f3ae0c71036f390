"""What `kvrdma doctor` asks of UCX: which library, which devices, what the settings do, one-sided or not."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from kvrdma.errors import TransportUnavailableError
from kvrdma.finding import Finding, green, red, yellow
from kvrdma.host import HostView
from kvrdma_ucx import library

_PROBE_S = 60
_AT_ONCE = 2
_MAX_DEVICES = 24
_NO_DEVICE = ("memory", "self", "sysv", "posix")
_CHOICES = ("UCX_TLS", "UCX_NET_DEVICES")
_GROUPS = {
    "all": "", "ib": "rc ud dc", "rc": "rc_verbs rc_mlx5", "rc_x": "rc_mlx5", "rc_v": "rc_verbs",
    "ud": "ud_verbs ud_mlx5",
    "dc": "dc_mlx5", "dc_x": "dc_mlx5", "shm": "posix sysv xpmem cma knem", "sm": "posix sysv xpmem cma knem",
    "mm": "posix sysv xpmem", "cuda": "cuda_copy cuda_ipc gdr_copy", "self": "self",
    "tcp": "tcp", "rocm": "", "ze": "",
}  # fmt: skip
_TRANSPORTS = ("cma", "knem", "xpmem", "posix", "sysv", "self", "tcp", "cuda_copy", "cuda_ipc", "gdr_copy", "gga_mlx5",
               "srd", "rdmacm", "aux")  # fmt: skip


class Probe(Protocol):
    """How UCX is opened in a process of its own; ``run_probe``, or what a test puts in its place."""

    def __call__(self, environ: Mapping[str, str], *, read: bool) -> dict[str, Any]:
        """Open it with this environment; with ``read`` also read."""
        ...


def diagnose(host: HostView) -> list[Finding]:
    """Run every check; what needs UCX itself only on this host."""
    findings = [*_net_devices(host), *_tls(host), *_gid_index(host), *_soft_roce(host), *_unwise(host)]
    if host.live:
        about, loads = _library(host.environ)
        findings += [about, *_copies(python_folders())]
        if loads:
            findings += [*_effect(host.environ, run_probe), *_one_sided(host.environ, run_probe)]
    return findings


def run_probe(environ: Mapping[str, str], *, read: bool) -> dict[str, Any]:
    """Open UCX in a process of its own; what it wrote to stderr and stdout is in ``said``."""
    command = [sys.executable, "-m", "kvrdma_ucx.probe", *(["--read"] if read else [])]
    try:
        ended = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {_PROBE_S} s", "said": ""}
    lines = ended.stdout.splitlines()
    said = "\n".join([*lines[:-1], *ended.stderr.splitlines()])
    try:
        return {**json.loads(lines[-1]), "said": said}
    except (IndexError, ValueError):
        return {"error": f"ended with {ended.returncode}: {said[-500:]}", "said": said}


def _library(environ: Mapping[str, str]) -> tuple[Finding, bool]:
    """Say which UCX is used; and whether it loads."""
    check = "ucx library"
    try:
        library.load()
        found = library.candidates()
    except TransportUnavailableError as error:
        why = "no other host can be read by this transport"
        if not library.mapped_copies() and not environ.get("KVRDMA_UCX_LIB"):  # there is none, and nothing is wrong
            fix = "pip install 'kvrdma[ucx]' for tcp; for RDMA the system's UCX, or the transport verbs"
            return yellow(check, str(error), why, fix), False
        return red(check, str(error), why, "what the message says"), False
    source, path = found[0]
    mine = library.UcxLibrary(path, source)
    others = ", ".join(f"{path} ({source})" for source, path in found[1:])
    built = [name for name, has in (("verbs", mine.has_verbs), ("CUDA", mine.has_cuda)) if has]
    text = f"{path}, chosen by {source}, built with support for {' and '.join(built) or 'neither verbs nor CUDA'}"
    text += f"; would load otherwise: {others or 'none'}"
    if mine.has_verbs:
        return green(check, text), True
    return yellow(
        check,
        text,
        "a UCX without verbs can never do RDMA: it falls back to tcp without a word",
        "install the system's UCX (apt install libucx0, dnf install ucx ucx-ib, or MLNX_OFED), or "
        "KVRDMA_UCX_LIB=FOLDER of one with verbs (/opt/hpcx/ucx/lib)",
    ), True


def python_folders() -> list[Path]:
    """Give the folders in which this interpreter's packages are."""
    return sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


def _copies(folders: Iterable[Path]) -> list[Finding]:
    """Look for UCX bundled in other packages: one of those in the same process is refused."""
    bundled = sorted(
        path
        for folder in folders
        for pattern in ("*.libs/libucp*.so*", "*/lib/libucp*.so.0", "*/libucp*.so*")
        for path in folder.glob(pattern)
        if path.parts[-3:-1] != ("libucx", "lib")
    )
    if not bundled:
        return [green("ucx copies", "no package of this environment bundles another UCX")]
    return [
        yellow(
            "ucx copies",
            ", ".join(map(str, bundled)),
            "two UCX in one process hang or crash: kvrdma refuses to start where that package is imported first",
            "keep it in an environment of its own, or out of the processes that use kvrdma",
        )
    ]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.removeprefix("^").split(",") if word.strip()]


def network_names(host: HostView) -> list[str]:
    """List what UCX_NET_DEVICES can name on this host: RDMA ports and network devices."""
    ports = [
        f"{device.name}:{port.name}"
        for device in host.entries(host.sys / "class/infiniband")
        for port in host.entries(device / "ports")
    ]
    return [*ports, *(entry.name for entry in host.entries(host.sys / "class/net"))]


def _net_devices(host: HostView) -> list[Finding]:
    setting = host.environ.get("UCX_NET_DEVICES", "")
    if setting in ("", "all"):
        return []
    names = network_names(host)
    lost = [word for word in _words(setting) if not fnmatch.filter(names, word) and word != "all"]
    if not lost:
        return [green("UCX_NET_DEVICES", setting)]
    near = [name for name in names if any(name.partition(":")[0] == word.partition(":")[0] for word in lost)]
    return [
        red(
            "UCX_NET_DEVICES",
            f"{', '.join(lost)} of {setting!r} names nothing here",
            "UCX ignores what it does not find, and uses whatever is left: often nothing but shared memory",
            f"name one of {', '.join(near or names) or 'none: there is no network device'} (RDMA ports as DEVICE:PORT)",
        )
    ]


def _tls(host: HostView) -> list[Finding]:
    setting = host.environ.get("UCX_TLS", "")
    if setting in ("", "all"):
        return []
    known = {*_GROUPS, *_TRANSPORTS, *" ".join(_GROUPS.values()).split()}
    words = [word.removeprefix("\\").partition(":")[0] for word in _words(setting)]
    unknown = [word for word in words if word not in known]
    if unknown:
        return [
            red(
                "UCX_TLS",
                f"{', '.join(unknown)} of {setting!r} is no transport of UCX",
                "'transports ... are not available': UCX leaves them out and takes what remains",
                f"use names such as {', '.join(sorted(known)[:20])}",
            )
        ]
    inclusive = not setting.startswith("^")
    if (
        inclusive
        and host.entries(host.sys / "class/infiniband")
        and not {*words} & {"all", "ib", "rc", "dc", "rc_x", "dc_x", "rc_v", "rc_mlx5", "rc_verbs", "dc_mlx5", "srd"}
    ):
        return [
            yellow(
                "UCX_TLS",
                f"{setting!r} leaves RDMA out, and there are RDMA NICs",
                "reads go over tcp, served by the peer's CPU",
                f"UCX_TLS={setting},rc or unset UCX_TLS",
            )
        ]
    return [green("UCX_TLS", setting)]


def _gid_index(host: HostView) -> list[Finding]:
    setting = host.environ.get("UCX_IB_GID_INDEX", "")
    if setting in ("", "auto"):
        return []
    why = "a GID that is not there or not routed ends in 'ibv_create_ah failed' or a timeout at the first read"
    if not setting.isdecimal():
        return [red("UCX_IB_GID_INDEX", setting, why, "unset it, or give the number of an entry")]
    found: list[str] = []
    bad: list[str] = []
    for device in host.entries(host.sys / "class/infiniband"):
        for port in host.entries(device / "ports"):
            if host.text(port / "link_layer") != "Ethernet":
                continue
            value = host.text(port / "gids" / setting)
            kind = host.text(port / "gid_attrs/types" / setting)
            text = f"{device.name}:{port.name} {kind or 'empty'} {value}"
            (found if value.replace(":", "").strip("0") and kind == "RoCE v2" else bad).append(text)
    if not bad:
        return [green("UCX_IB_GID_INDEX", f"{setting}: {'; '.join(found) or 'no RoCE port'}")]
    fix = "unset it: UCX chooses RoCE v2 by itself; or name the entry whose type is RoCE v2 (show_gids)"
    return [red("UCX_IB_GID_INDEX", f"{setting}: {'; '.join(bad)}", why, fix)]


def _soft_roce(host: HostView) -> list[Finding]:
    """Name the settings without which UCX does nothing over RDMA in software; kvrdma/DESIGN.md has the causes."""
    soft = [device.name for device in host.entries(host.sys / "class/infiniband") if host.text(device / "parent")]
    needed = {"UCX_UD_VERBS_ETH_DGID_CHECK": "n", "UCX_IB_ASYNC_EVENTS": "n"}
    if not soft:
        return []
    names = ", ".join(soft)
    missing = [f"{name}={value}" for name, value in needed.items() if host.environ.get(name, "").lower() != value]
    if not missing:
        return [green("ucx on soft-RoCE", f"{names}, with {' and '.join(needed)} set")]
    return [
        yellow(
            "ucx on soft-RoCE",
            f"{names} is RDMA in software, without {' '.join(missing)}",
            "UCX drops the datagrams by which it connects there ('did not answer'), "
            "and 1.18 ends the process when a peer goes away",
            f"{' '.join(missing)}, or the transport verbs, which needs neither; unset them on a real NIC",
        )
    ]


def _unwise(host: HostView) -> list[Finding]:
    found = []
    if host.environ.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "").lower() in ("n", "no", "off", "0"):
        found.append(
            yellow(
                "UCX_CUDA_IPC_ENABLE_GET_ZCOPY",
                "n",
                "reads between GPUs without NVLink are then copied in small pieces: 100 times slower",
                "unset it or set y",
            )
        )
    if host.environ.get("UCX_PROTO_EMULATION_ENABLE", "").lower() in ("n", "no", "off", "0"):
        found.append(
            yellow(
                "UCX_PROTO_EMULATION_ENABLE",
                "n",
                "every peer that is not one-sided is refused by UCX itself, with 'No zero-copy protocol found'",
                "unset it and use KVRDMA_REQUIRE_ONE_SIDED=1, whose message says which peer",
            )
        )
    return found


def _effect(environ: Mapping[str, str], probe: Probe) -> list[Finding]:
    """Open UCX with the settings and without, and say what the settings take away."""
    settings = {name: value for name, value in environ.items() if name.startswith("UCX_")}
    asked = probe(environ, read=False)
    if "error" in asked:
        why = "no read over the network is possible"
        fix = f"unset {', '.join(sorted(settings))} and try again" if settings else "what the message says"
        return [red("ucx settings", f"UCX does not open: {asked['error']}", why, fix)]
    found = [*_unused(asked["said"]), *_warned(asked["said"])]
    if not settings:
        return [*found, green("ucx settings", f"none; transports {asked['transports']}")]
    plain = probe({name: value for name, value in environ.items() if name not in settings}, read=False)
    lost = sorted(set(plain.get("transports", "").split()) - set(asked["transports"].split()))
    text = ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))
    text = f"{text}; leaves {asked['transports'] or 'nothing'}; takes away {' '.join(lost) or 'nothing'}"
    if not [resource for resource in asked["transports"].split() if resource.partition("/")[2] not in _NO_DEVICE]:
        fix = f"unset {' or '.join(name for name in _CHOICES if name in settings) or 'them'}"
        return [*found, red("ucx settings", text, "no network device is left", fix)]
    return [*found, green("ucx settings", text)]


def _unused(said: str) -> list[Finding]:
    match = re.search(r"unused environment variables?: (.+)", said)
    if not match:
        return []
    return [
        yellow(
            "ucx settings",
            f"UCX knows nothing of {match[1]}",
            "a setting with a mistyped name has no effect",
            "ucx_info -cf lists the names of this version",
        )
    ]


def _warned(said: str) -> list[Finding]:
    lines = re.findall(r"UCX\s+(?:WARN|ERROR)\s+(.+)", said)
    lines = [line for line in dict.fromkeys(lines) if "unused environment" not in line]
    if not lines:
        return []
    fix = "the message names the setting; unset it, or see docs/troubleshooting.md"
    return [yellow("ucx warnings", "; ".join(lines)[:1000], "UCX went on without what it asks for", fix)]


def _one_sided(environ: Mapping[str, str], probe: Probe) -> list[Finding]:
    """Read over each network device by itself."""
    plain = {name: value for name, value in environ.items() if name not in _CHOICES}
    resources = probe(plain, read=False).get("transports", "").split()
    pairs = [resource.partition("/")[::2] for resource in resources]
    pairs = [(tl, device) for tl, device in pairs if device not in _NO_DEVICE and not tl.startswith(("cuda", "gdr"))]
    settings = [{**plain, "UCX_TLS": tl, "UCX_NET_DEVICES": device} for tl, device in pairs[:_MAX_DEVICES]]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        results = list(pool.map(lambda env: probe(env, read=True), settings))
    found = []
    for (tl, device), result in zip(pairs, results, strict=False):
        check = f"read over {tl}/{device}"
        if "error" in result:
            why = "the device is listed, but nothing can be read over it"
            found.append(yellow(check, f"failed: {result['error']}", why, f"UCX_NET_DEVICES without {device}"))
        elif result["one_sided"]:
            found.append(green(check, f"one-sided, by {result['via']}"))
        else:
            found.append(green(check, f"emulated, by {result['via']}"))
    return found
