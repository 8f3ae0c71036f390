"""Two network namespaces joined by a line that delays and loses packets; root only.

``tc netem`` would do, but many kernels are built without it. So the line is a tap device on either side and a thread
between them.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from types import SimpleNamespace, TracebackType
from typing import Self

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_SLAVE_REC = (1 << 19) | 16384


def enter(state: SimpleNamespace, namespace: str) -> None:
    """Move the calling thread, and all it will start, into a network namespace; for ``PeerProcess.call``.

    With a ``/sys`` of its own, where UCX looks for network devices.
    """
    del state
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    for failed in (
        libc.setns(fd, _CLONE_NEWNET),
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_SLAVE_REC, None),
        libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
    os.close(fd)


class TwoHosts:
    """Names: ``hosts`` are the namespaces, ``addresses`` what they are reached by, ``device`` is in each."""

    def __init__(self, delay_s: float, loss: float) -> None:
        self.delay_s = delay_s
        self.loss = loss
        self.carried = self.lost = 0
        self.device = "kvline"
        self.hosts = [f"kv{os.getpid()}{side}" for side in "ab"]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self._ends: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Self:
        for host, address in zip(self.hosts, self.addresses, strict=True):
            _ip("netns", "add", host)
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            name = f"t{host}"[:15]
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
            self._ends.append(end)
            _ip("link", "set", name, "netns", host, "name", self.device)
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", self.device)
            for device in ("lo", self.device):
                _ip("-n", host, "link", "set", device, "up")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(5)
        for end in self._ends:
            os.close(end)
        for host in self.hosts:
            _ip("netns", "del", host)

    def _carry(self) -> None:
        rng, order = random.Random(1), itertools.count()
        waiting: list[tuple[float, int, int, bytes]] = []
        poller = select.poll()
        for end in self._ends:
            poller.register(end, select.POLLIN)
        while not self._stop.is_set():
            wait_s = min(0.1, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for fd, _ in poller.poll(max(0.0, wait_s) * 1e3):
                packet = os.read(fd, 1 << 16)
                if rng.random() < self.loss:
                    self.lost += 1
                    continue
                to = self._ends[1 - self._ends.index(fd)]
                heapq.heappush(waiting, (time.monotonic() + self.delay_s, next(order), to, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(waiting)
                self.carried += 1
                os.write(to, packet)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
