"""Skips what this machine cannot run, in the open; `--require what` turns such skips into failures."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
UCX_DEBIAN = ROOT / ".deps/ucx-debian/usr/lib/x86_64-linux-gnu"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a run in the background, and so would be all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _module(name: str) -> Callable[[], bool]:
    def found() -> bool:
        parents = [name.rsplit(".", n)[0] for n in range(name.count("."), -1, -1)]
        return all(importlib.util.find_spec(parent) is not None for parent in parents)

    return found


def _gpu() -> bool:
    return Path("/dev/nvidiactl").exists() and _module("cupy")()


def _cma() -> bool:
    """Whether this process may attach to its child: what cma needs between two processes of one user."""
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.process_vm_readv(child, None, 0, None, 0, 0)
        return ctypes.get_errno() != 1  # EPERM
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def _netns() -> bool:
    """Whether network namespaces and veth pairs can be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"kvtry{os.getpid()}"
    made = subprocess.run(
        ["ip", "link", "add", name, "type", "veth", "peer", f"{name}p"], capture_output=True, check=False
    )
    if made.returncode == 0:
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    space = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if space.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.returncode == space.returncode == 0


def _verbs() -> bool:
    """Whether kvrdma_verbs was built with its native part and there is an active RDMA port."""
    ports = Path("/sys/class/infiniband").glob("*/ports/*/state")
    return _module("kvrdma_verbs._verbs")() and any("ACTIVE" in port.read_text() for port in ports)


NEEDS: dict[str, Callable[[], bool]] = {
    "amx": lambda: "amx_tile" in Path("/proc/cpuinfo").read_text(),
    "cma": _cma,
    "gpu": _gpu,
    "netns": functools.cache(_netns),
    "nvrtc": _module("cuda.bindings.nvrtc"),
    "rdma-guest": (ROOT / ".deps/rdma/stamp").exists,
    "root": lambda: os.geteuid() == 0,
    "torch": _module("torch"),
    "tun": lambda: Path("/dev/net/tun").exists() and shutil.which("ip") is not None,
    "ucx": _module("libucx"),
    "ucx-debian": (UCX_DEBIAN / "libucp.so.0").exists,
    "verbs": functools.cache(_verbs),
    "vllm": _module("vllm"),
}

CURES = {"rdma-guest": "run scripts/fetch-rdma, then scripts/setup dev", "ucx-debian": "run scripts/fetch-ucx"}
FIRST = ("test_e2e_", "test_smoke.py", "test_ucx_library.py")
"""Files of the longest groups, longest first: what is begun last must not keep one process busy alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what takes too long to run each time")
    parser.addoption("--require", default="", help=f"fail instead of skip without these: {', '.join(NEEDS)}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): one process runs them all; where there is no xdist, any one")
    unknown = set(filter(None, config.getoption("--require").split(","))) - set(NEEDS)
    if unknown:
        raise pytest.UsageError(f"--require {','.join(sorted(unknown))} is unknown: use {', '.join(NEEDS)}")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        left = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: [not item.path.name.startswith(name) for name in FIRST])
    for item in items:
        # For --dist loadgroup: a file stays in one process, and so do all that start engines, which need two cores.
        name = "engines" if item.path.name.startswith("test_e2e_") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))
        if any(mark.args[0] == "vllm" for mark in item.iter_markers("needs")):
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # of what vLLM imports; not ours to mend


def pytest_runtest_setup(item: pytest.Item) -> None:
    required = set(item.config.getoption("--require").split(","))
    for mark in item.iter_markers("needs"):
        what = mark.args[0]
        if NEEDS[what]():
            continue
        cure = f": {CURES[what]}" if what in CURES else ""
        if what in required:
            pytest.fail(f"{what} is required and missing{cure}", pytrace=False)
        pytest.skip(f"needs {what}{cure}")
