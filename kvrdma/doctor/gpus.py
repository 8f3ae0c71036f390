"""GPUs: which NIC is near which, and whether a NIC can reach their memory."""

from __future__ import annotations

import re

from kvrdma.doctor.pci import NEAR, PciDevice, distance, pci_devices, rank_of
from kvrdma.doctor.rdma import RdmaPort, rdma_ports
from kvrdma.finding import Finding, green, red, yellow
from kvrdma.host import HostView

_NVIDIA, _DISPLAY, _BRIDGE = 0x10DE, 0x03, 0x0680
_DMABUF_KERNEL = (5, 12)


def gpus(host: HostView) -> list[PciDevice]:
    """List NVIDIA GPUs by PCI address: their number with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``."""
    return [d for d in pci_devices(host) if d.vendor == _NVIDIA and d.device_class >> 16 == _DISPLAY]


def check_gpus(host: HostView) -> list[Finding]:
    """Check GPUs, their way to the NICs and to each other."""
    found, ports = gpus(host), [port for port in rdma_ports(host) if port.active and port.pci]
    if not found:
        return [green("gpus", "none of NVIDIA: caches in host memory")]
    findings = [_gpus(host, found)]
    if ports:
        findings += [_distances(found, ports), _gpudirect(host)]
    return [*findings, _nvlink(host, found), *_segments(host)]


def _gpus(host: HostView, found: list[PciDevice]) -> Finding:
    version = host.text(host.proc / "driver/nvidia/version")
    text = f"{len(found)}: {', '.join(gpu.address for gpu in found)}"
    if not version:
        return red(
            "gpus",
            f"{text}; no driver",
            "without the driver there is no CUDA memory to read into",
            "install the NVIDIA driver; in a container run with --gpus all (NVIDIA container toolkit)",
        )
    number = re.search(r"\s(\d{3}\.[\d.]+)", version)
    return green("gpus", f"{text}; driver {number[1] if number else 'of unknown version'}")


def nearest(gpu: PciDevice, ports: list[RdmaPort]) -> tuple[str, list[RdmaPort]]:
    """Give the shortest distance from a GPU to any port, and the ports at it."""
    names = {port.name: distance(gpu, port.pci) for port in ports if port.pci}
    best = min(names.values(), key=rank_of)
    return best, [port for port in ports if names.get(port.name) == best]


def _distances(found: list[PciDevice], ports: list[RdmaPort]) -> Finding:
    lines, far = [], []
    for number, gpu in enumerate(found):
        name, close = nearest(gpu, ports)
        chosen = close[number % len(close)]
        node = f" numactl --cpunodebind={gpu.numa} --membind={gpu.numa}" if gpu.numa >= 0 else ""
        choice = f"CUDA_VISIBLE_DEVICES={number} UCX_NET_DEVICES={chosen.name}{node}"
        lines.append(f"GPU {number} {name} {chosen.name}: {choice}")
        if name not in NEAR:
            far.append(f"GPU {number} is {name} from {chosen.name}")
    text = "per rank: " + "; ".join(lines)
    if not far:
        return green("gpu to nic", text)
    return yellow(
        "gpu to nic",
        f"{', '.join(far)}; {text}",
        "between sockets GPUDirect reaches a fraction of the link's rate, or is refused by the chipset",
        "give those ranks a NIC of their own socket, or move the card; UCX chooses by the same distances, so "
        "that ranks on one NIC share its rate",
    )


def _gpudirect(host: HostView) -> Finding:
    check = "gpudirect"
    version = host.text(host.proc / "driver/nvidia/version")
    if (host.sys / "module/nvidia_peermem").exists():
        return green(check, "nvidia_peermem is loaded")
    release = re.match(r"(\d+)\.(\d+)", host.text(host.proc / "sys/kernel/osrelease"))
    kernel = (int(release[1]), int(release[2])) if release else (0, 0)
    if "Open Kernel Module" in version and kernel >= _DMABUF_KERNEL:
        return green(check, f"dmabuf: open driver modules on kernel {kernel[0]}.{kernel[1]}")
    return red(
        check,
        f"nvidia_peermem is not loaded, and {'the open driver modules' if version else 'a driver'} for dmabuf "
        f"(kernel 5.12 or later, here {kernel[0]}.{kernel[1]}) are not there",
        "NICs cannot reach GPU memory: reads into it pass through the host, or registration fails",
        "modprobe nvidia_peermem (on the host, not in the container); or use the open kernel modules of the driver",
    )


def _nvlink(host: HostView, found: list[PciDevice]) -> Finding:
    switches = [d for d in pci_devices(host) if d.vendor == _NVIDIA and d.device_class >> 8 == _BRIDGE]
    if switches:
        return green("nvlink", f"{len(switches)} NVSwitches: GPUs of this host read each other by cuda_ipc")
    if len(found) == 1:
        return green("nvlink", "one GPU")
    return yellow(
        "nvlink",
        "no NVSwitch; bridges between pairs of GPUs do not show here",
        "without NVLink reads between GPUs of this host take the PCI bus, and need UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y or "
        "they run 100 times slower",
        "nvidia-smi topo -m shows NV# where there is a bridge; otherwise export UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y",
    )


def _segments(host: HostView) -> list[Finding]:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    bad = [name for name in names if "expandable_segments:true" in host.environ.get(name, "").lower()]
    if not bad:
        return []
    return [
        red(
            "expandable segments",
            f"{bad[0]}={host.environ[bad[0]]}",
            "memory mapped that way cannot be exported by cuda_ipc or registered as one region; vLLM refuses it with "
            "any KV connector",
            f"unset {bad[0]}, or set expandable_segments:False",
        )
    ]
