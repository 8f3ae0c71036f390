"""What the operating system and a container allow."""

from __future__ import annotations

import re

from kvrdma.finding import Finding, green, red, yellow
from kvrdma.host import HostView

_SHM = "/dev/shm"  # noqa: S108 - the mount point, not a file of ours
_HOST_PID_NAMESPACE = "pid:[4026531836]"
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
_ENOUGH_LOCKED = 64 << 30
_ENOUGH_SHM = 1 << 30


def check_limits(host: HostView) -> list[Finding]:
    """Check limits, rights and the container."""
    return [_memlock(host), _files(host), *_shm(host), _ptrace(host), _pid_namespace(host), _container(host)]


def _has(host: HostView, capability: int) -> bool:
    mask = host.status("CapEff")
    return bool(mask) and bool(int(mask, 16) >> capability & 1)


def _limit(host: HostView, name: str) -> str:
    for line in host.text(host.proc / "self/limits").splitlines():
        if line.startswith(name):
            return line[len(name) :].split()[0]
    return ""


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes and not nbytes % (1 << 20) else f"{nbytes >> 10} KiB"


def _memlock(host: HostView) -> Finding:
    limit = _limit(host, "Max locked memory")
    nbytes = int(limit) if limit.isdecimal() else 0
    found = _size(nbytes) if limit.isdecimal() else limit or "unknown"
    if limit == "unlimited" or _has(host, _CAP_IPC_LOCK):
        return green("memlock", limit if limit == "unlimited" else f"{found}, and CAP_IPC_LOCK lifts it")
    why = "registering memory for RDMA pins it: beyond this limit registration fails ('Cannot allocate memory')"
    fix = "ulimit -l unlimited (/etc/security/limits.d, systemd: LimitMEMLOCK=infinity; container: --ulimit memlock=-1)"
    rdma = bool(host.entries(host.sys / "class/infiniband"))
    return red("memlock", found, why, fix) if rdma and nbytes < _ENOUGH_LOCKED else yellow("memlock", found, why, fix)


def _files(host: HostView) -> Finding:
    limit = _limit(host, "Max open files")
    if not limit or limit == "unlimited" or int(limit) >= 4096:
        return green("open files", limit or "unknown")
    return yellow(
        "open files",
        limit,
        "each peer takes some descriptors, for control channel and connection: hundreds of peers need thousands",
        "ulimit -n 65536",
    )


def _shm(host: HostView) -> list[Finding]:
    for line in host.text(host.proc / "self/mounts").splitlines():
        words = line.split()
        if len(words) < 4 or words[1] != _SHM:
            continue
        size = re.search(r"size=(\d+)([kmg]?)", words[3])
        if not size:
            return [green(_SHM, "half of the memory")]
        nbytes = int(size[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[size[2]]
        if nbytes >= _ENOUGH_SHM:
            return [green(_SHM, f"{nbytes >> 20} MiB")]
        return [
            yellow(
                _SHM,
                f"{nbytes >> 20} MiB",
                "vLLM's ranks and UCX's shared memory use it; docker's default of 64 MiB ends in 'Bus error'",
                "docker run --shm-size=16g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm",
            )
        ]
    return [yellow(_SHM, "not mounted", "vLLM's ranks exchange through it", "mount a tmpfs at /dev/shm, 1 GiB or more")]


def _ptrace(host: HostView) -> Finding:
    scope = host.text(host.proc / "sys/kernel/yama/ptrace_scope") or "0"
    able = _has(host, _CAP_SYS_PTRACE)
    if scope == "0" or able:
        return green("ptrace", f"scope {scope}{', CAP_SYS_PTRACE' if able else ''}")
    why = (
        "reading another process of this host (process_vm_readv) needs the right to attach to it: without it "
        "same-host reads fail with 'Operation not permitted' and go over tcp instead"
    )
    fix = "sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE (container: --cap-add SYS_PTRACE)"
    return yellow("ptrace", f"scope {scope}, no CAP_SYS_PTRACE", why, fix)


def _pid_namespace(host: HostView) -> Finding:
    namespace = host.link(host.proc / "self/ns/pid")
    if namespace in ("", _HOST_PID_NAMESPACE):
        return green("pid namespace", "the host's" if namespace else "unknown")
    return yellow(
        "pid namespace",
        f"{namespace}, not the host's",
        "processes in different PID namespaces cannot read each other's memory, nor use cuda_ipc between them",
        "only where producer and consumer are two containers of one host: --pid=host, or hostPID / "
        "shareProcessNamespace in Kubernetes",
    )


def _container(host: HostView) -> Finding:
    kubernetes = "KUBERNETES_SERVICE_HOST" in host.environ
    cgroup = host.text(host.proc / "1/cgroup") + host.text(host.proc / "self/mountinfo")[:4096]
    kind = "Kubernetes" if kubernetes or "kubepods" in cgroup else ""
    kind = kind or ("a container" if re.search(r"docker|containerd|libpod|lxc|overlay / ", cgroup) else "")
    if not kind:
        return green("container", "none")
    lacks = [
        name for name, bit in (("IPC_LOCK", _CAP_IPC_LOCK), ("SYS_PTRACE", _CAP_SYS_PTRACE)) if not _has(host, bit)
    ]
    if not lacks:
        return green("container", f"{kind}, with IPC_LOCK and SYS_PTRACE")
    options = " ".join(f"--cap-add {name}" for name in lacks)
    fix = f"docker run {options} --ulimit memlock=-1 --ipc=host --network=host --device /dev/infiniband"
    if kind == "Kubernetes":
        fix = f"securityContext.capabilities.add: [{', '.join(lacks)}]; hostNetwork or an RDMA CNI; hostIPC"
    why = "RDMA pins memory, and reads within one host attach to processes"
    return yellow("container", f"{kind}, without {' and '.join(lacks)}", why, fix)
