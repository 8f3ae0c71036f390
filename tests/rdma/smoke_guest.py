"""A small guest for soft-RoCE: kernel and QEMU from scripts/fetch-rdma, and the host's own files, read-only.

No image is made and nothing is copied: the guest sees the host's root over 9p, so the tests run from where they are,
by the Python that is there. They leave ``log``, ``status`` and ``smoke.xml``, the guest leaves ``console``.
"""

from __future__ import annotations

import lzma
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RDMA = ROOT / ".deps/rdma"
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "veth", "crc32_generic", "rdma_rxe", "ib_uverbs")


def kernel_module(path: Path) -> bytes:
    packed = path.read_bytes()
    return lzma.decompress(packed) if path.suffix == ".xz" else packed


def with_what_they_need(names: Iterable[str], found: dict[str, Path], done: dict[str, bytes]) -> dict[str, bytes]:
    """Kernel modules by name, each behind those it depends on."""
    for name in names:
        if name in found and name not in done:  # or it is part of the kernel itself
            binary = kernel_module(found[name])
            depends = re.search(rb"\0depends=([^\0]*)\0", binary)
            with_what_they_need((depends[1].decode() if depends else "").split(","), found, done)
            done[name] = binary
    return done


def newc(entries: Iterable[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """A cpio archive of (path, mode, content), as the kernel unpacks it."""
    for number, (path, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")]):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        header = b"070701" + b"".join(b"%08x" % field for field in fields) + name
        yield header + bytes(-len(header) % 4) + content + bytes(-len(content) % 4)


def initramfs(what: str) -> bytes:
    found = {path.name.partition(".ko")[0].replace("-", "_"): path for path in RDMA.glob("usr/lib/modules/**/*.ko*")}
    modules = with_what_they_need(MODULES, found, {})
    settings = {"REPOSITORY": str(ROOT), "RDMA": str(RDMA), "MODULES": " ".join(modules), "WHAT": what}
    entries = [(name, 0o40755, b"") for name in ("bin", "dev", "host", "modules", "new", "proc", "sys")]
    entries += [(f"modules/{name}", 0o100644, binary) for name, binary in modules.items()]
    entries.append(("bin/busybox", 0o100755, (RDMA / "usr/bin/busybox").read_bytes()))
    entries.append(("init", 0o100755, (ROOT / "tests/rdma/smoke-init").read_bytes()))
    text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    entries.append(("settings", 0o100644, text.encode()))
    return b"".join(newc(entries))


def command(results: Path) -> list[str]:
    """Start QEMU as it was unpacked, with its own libraries and firmware."""
    usr = RDMA / "usr"
    firmware = [option for folder in ("qemu", "seabios") for option in ("-L", str(usr / "share" / folder))]
    return [
        *("env", f"LD_LIBRARY_PATH={next(usr.glob('lib/*-linux-gnu'))}", str(usr / "bin/qemu-system-x86_64")),
        *(*firmware, "-nodefaults", "-display", "none", "-serial", "stdio", "-no-reboot"),
        *("-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", "2048"),  # two processors take twice the time of one
        *("-kernel", str(RDMA / "vmlinuz"), "-initrd", str(results / "initramfs")),
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr"),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        *("-virtfs", f"local,path={results},mount_tag=results,security_model=none"),
    ]


def boot(results: Path, deadline_s: float, what: str = "smoke") -> None:
    """Boot the guest, and wait until it has ended.

    Raises:
        subprocess.TimeoutExpired: it has not, and was killed.
    """
    (results / "initramfs").write_bytes(initramfs(what))
    with (results / "console").open("wb") as console:
        subprocess.run(
            command(results), stdin=subprocess.DEVNULL, stdout=console, stderr=console, timeout=deadline_s, check=False
        )
    (results / "initramfs").unlink()
