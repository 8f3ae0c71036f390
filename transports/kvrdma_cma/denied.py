"""Why the operating system denies reading another process, and what to do about it."""

from __future__ import annotations

import os
from pathlib import Path

_CAP_SYS_PTRACE = 19


def explain(pid: int, proc: Path = Path("/proc")) -> str:
    """Name the likely causes of EPERM from ``process_vm_readv`` on ``pid``, each with its cure.

    Args:
        pid: the process that may not be read.
        proc: where procfs is mounted; tests pass a saved tree.
    """
    causes = []
    ours, theirs = _uid(proc / "self"), _uid(proc / str(pid))
    if ours and theirs and ours != theirs:
        causes.append(f"it runs as user {theirs}, this process as user {ours}: run both as one user")
    scope = _text(proc / "sys/kernel/yama/ptrace_scope")
    if scope not in ("", "0"):
        causes.append(
            f"kernel.yama.ptrace_scope is {scope}: set it to 0 (sysctl kernel.yama.ptrace_scope=0), or let the "
            "peer call prctl(PR_SET_PTRACER, reader's pid)"
        )
    if not _has_ptrace_capability(proc / "self"):
        causes.append("this process lacks CAP_SYS_PTRACE: add it (container: --cap-add SYS_PTRACE)")
    if not causes:
        causes.append("a security module or seccomp filter forbids it: allow process_vm_readv in the profile")
    return "; ".join(causes) + "; or use a network transport"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _status(process: Path, field: str) -> str:
    for line in _text(process / "status").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return value.strip()
    return ""


def _uid(process: Path) -> str:
    values = _status(process, "Uid").split()
    return values[1] if len(values) > 1 else ""


def _has_ptrace_capability(process: Path) -> bool:
    mask = _status(process, "CapEff")
    return bool(mask) and bool(int(mask, 16) >> _CAP_SYS_PTRACE & 1)


def pid_namespace() -> int:
    """Give the inode of this process's PID namespace: processes see each other's PIDs only within one."""
    return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - the link's target, not its text


def boot_id() -> bytes:
    """Give the 16 bytes that the kernel drew when this host was booted."""
    return bytes.fromhex(_text(Path("/proc/sys/kernel/random/boot_id")).replace("-", ""))
