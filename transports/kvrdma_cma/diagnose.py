"""What `kvrdma doctor` asks about reading other processes of this host."""

from __future__ import annotations

from kvrdma.finding import Finding, red, yellow
from kvrdma.host import HostView

_FILTERED = "2"
"""``Seccomp:`` of a process with a filter."""


def diagnose(host: HostView) -> list[Finding]:
    """Check what the kernel needs for ``process_vm_readv`` beyond the right to attach."""
    found: list[Finding] = []
    if host.status("Seccomp") == _FILTERED:
        found.append(
            yellow(
                "process_vm_readv",
                "a seccomp filter is active",
                "those of older container runtimes (Docker before 19.03) forbid process_vm_readv: 'Operation not "
                "permitted'",
                "docker run --cap-add SYS_PTRACE, which lifts that rule too; or --security-opt seccomp=unconfined",
            )
        )
    if host.text(host.proc / "sys/kernel/yama/ptrace_scope") == "3":
        found.append(
            red(
                "process_vm_readv",
                "kernel.yama.ptrace_scope is 3: nobody may attach until the next boot",
                "no process can read another one's memory: same-host reads go over tcp",
                "boot with a sysctl.d file that sets kernel.yama.ptrace_scope = 0 or 1",
            )
        )
    return found
