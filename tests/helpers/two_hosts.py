"""Two network namespaces joined by a line of a given rate that delays and loses frames; root only.

``tc netem`` does that where the kernel has it; many are built without. Else the line is a tap device on either side and
a thread between them, which also keeps the rate: a frame has to wait there anyway, and a kernel without netem need not
have tbf.
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
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace

from tests.helpers.hosts import Hosts, VethHosts, ip

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x400454CA, 0x0002, 0x1000, 0x4000
_TUNSETOFFLOAD, _CSUM_TSO4_TSO6 = 0x400454D0, 0x7
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_SLAVE_REC = (1 << 19) | 16384
_QUEUE_S = 0.05
"""What a full queue delays a frame; what comes then is dropped, as by a switch."""
_BURST = 64


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


@dataclass(frozen=True, slots=True)
class Line:
    """What a line between two hosts does to frames, in either direction."""

    delay_s: float = 0.001
    loss: float = 0.001
    gbit_s: float = 10.0


class Pace:
    """When frames leave a line: one after another, each after the time that its bits take."""

    def __init__(self, gbit_s: float) -> None:
        self._byte_s = 8e-9 / gbit_s
        self._free_s = 0.0

    def leaves_s(self, came_s: float, nbytes: int) -> float | None:
        """Give the time at which a frame has left; None if the queue in front of it is full, and it is dropped."""
        begins_s = max(came_s, self._free_s)
        if begins_s - came_s > _QUEUE_S:
            return None
        self._free_s = begins_s + nbytes * self._byte_s
        return self._free_s


class TwoHosts(Hosts):
    """Joined by a thread that carries frames between a tap device on either side; ``loss`` may be changed meanwhile."""

    def __init__(self, line: Line, *, six: bool = False, mtu: int = 1500, offload: bool = True) -> None:
        """``offload``: what TCP sends at once comes as one frame of up to 64 KiB: faster, but fewer to lose."""
        super().__init__(six=six)
        self.line, self.loss, self.mtu, self.offload = line, line.loss, mtu, offload
        self.carried = self.lost = 0
        self._ends: list[int] = []
        self._stop = threading.Event()

    def _join(self, stack: ExitStack) -> None:
        for side, host in enumerate(self.hosts):
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, end)
            name = f"t{os.getpid()}{host[-3:]}"[:15]
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
            if self.offload:
                fcntl.ioctl(end, _TUNSETOFFLOAD, _CSUM_TSO4_TSO6)
            self._ends.append(end)
            ip("link", "set", name, "txqueuelen", "10000", "netns", host, "name", self.device)
            self._raise(side, self.mtu)
        thread = threading.Thread(target=self._carry, daemon=True)
        thread.start()
        stack.callback(thread.join, 5)
        stack.callback(self._stop.set)

    def _carry(self) -> None:
        rng, order = random.Random(1), itertools.count()
        waiting: list[tuple[float, int, int, bytes]] = []
        ways = {end: (self._ends[1 - side], Pace(self.line.gbit_s)) for side, end in enumerate(self._ends)}
        poller = select.poll()
        for end in self._ends:
            poller.register(end, select.POLLIN)
        while not self._stop.is_set():
            wait_s = min(0.1, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for fd, _ in poller.poll(max(0.0, wait_s) * 1e3):
                to, pace = ways[fd]
                for frame in _frames(fd):
                    left_s = None if rng.random() < self.loss else pace.leaves_s(time.monotonic(), len(frame))
                    if left_s is None:
                        self.lost += 1
                    else:
                        heapq.heappush(waiting, (left_s + self.line.delay_s, next(order), to, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(waiting)
                self.carried += 1
                os.write(to, frame)


def _frames(end: int) -> Iterator[bytes]:
    """Read what has come, up to a burst."""
    for _ in range(_BURST):
        try:
            yield os.read(end, 1 << 17)
        except BlockingIOError:
            return


class NetemHosts(VethHosts):
    """Joined by a veth pair with the kernel's own delay, loss and rate."""

    def __init__(self, line: Line, *, six: bool = False, mtu: int = 1500) -> None:
        super().__init__(six=six, mtus=(mtu, mtu))
        self.line = line

    def _join(self, stack: ExitStack) -> None:
        super()._join(stack)
        for host in self.hosts:
            ip("netns", "exec", host, "tc", "qdisc", "add", "dev", self.device, *netem(self.line))


def netem(line: Line) -> list[str]:
    """Give the words of ``tc`` for a line; the queue holds what a full line delays, and more."""
    limit = int(line.gbit_s * 1e9 / 8 / 1000 * (line.delay_s + _QUEUE_S)) + 1000
    spoilt = ["delay", f"{line.delay_s * 1e6:.0f}us", "loss", f"{line.loss * 100:g}%"]
    return ["root", "netem", *spoilt, "rate", f"{line.gbit_s * 1e3:.0f}mbit", "limit", str(limit)]


def has_netem() -> bool:
    """Whether this kernel has netem and ``tc`` is installed: tried on the loopback device of a namespace."""
    name = f"kvnetem{os.getpid()}"
    ip("netns", "add", name)
    try:
        words = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", *netem(Line())]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    finally:
        ip("netns", "del", name)


def joined_by(line: Line, *, six: bool = False, mtu: int = 1500) -> TwoHosts | NetemHosts:
    """Two hosts joined by a line: of the kernel where it can, else of a thread of this process."""
    return (NetemHosts if has_netem() else TwoHosts)(line, six=six, mtu=mtu)
