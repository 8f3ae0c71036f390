"""Has libibverbs tell the verbs transport of this process that its NIC is lost, which soft-RoCE never does.

The transport, libibverbs and the descriptor's number are the real ones; behind the number is then a pipe with the bytes
that a kernel writes for IBV_EVENT_DEVICE_FATAL.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

EVENT = struct.pack("=QII", 0, 8, 0)
"""struct ib_uverbs_async_event_desc: element, IBV_EVENT_DEVICE_FATAL, reserved."""
ADD, READABLE = 1, 1


class _Watch(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _watched() -> Iterator[tuple[int, int, int]]:
    """(data, epoll, descriptor) of each descriptor of RDMA events that some epoll of this process watches."""
    kinds: dict[int, str] = {}
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the one by which the folder was listed
            kinds[int(path.name)] = str(path.readlink())
    for epoll in (number for number, kind in kinds.items() if kind.endswith("[eventpoll]")):
        text = Path(f"/proc/self/fdinfo/{epoll}").read_text()
        for number, data in re.findall(r"tfd:\s*(\d+) events:\s*\w+ data:\s*(\w+)", text):
            if kinds.get(int(number), "").endswith("[infinibandevent]"):
                yield int(data, 16), epoll, int(number)


def prepare(state: SimpleNamespace) -> None:
    """Put the pipe where the one transport of this process hears from its one NIC. It cannot connect any more."""
    completions, events = sorted(_watched())  # by Source in worker.hpp
    del completions
    data, epoll, number = events
    readable, state.kernel = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # the kernel's end stays open
    os.dup2(readable, number, inheritable=False)  # the epoll forgets what was there
    os.close(readable)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.epoll_ctl(epoll, ADD, number, ctypes.byref(_Watch(READABLE, data))) != 0:
        raise OSError(ctypes.get_errno(), "epoll_ctl failed")


def report(state: SimpleNamespace) -> None:
    """Report that the NIC is lost."""
    os.write(state.kernel, EVENT)
