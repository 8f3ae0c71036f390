"""The producer's side of a link test: opens transports and fills pools as it is told.

``LinkPeer.handle`` answers messages wherever they come from: a control channel (``link-test serve``), a
parent process (``python -m kvrdma.bench.link_peer``, which ``SpawnedPeer`` starts) or the same process.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import sys
import threading
import time
from dataclasses import dataclass

from kvrdma import __version__, wire
from kvrdma.bench.host_facts import describe_host
from kvrdma.bench.patterns import Case, Shape, find_mismatch, rows_of
from kvrdma.bench.pool import Pool, allocate
from kvrdma.bench.reading import timed_read
from kvrdma.bench.ready import wait_readable
from kvrdma.config import Config
from kvrdma.errors import ConfigError, ControlError, MessageError
from kvrdma.sidechannel import Endpoint, SideChannelServer
from kvrdma.transport import Device, Peer, Region, Transport, open_transport

MAX_LINKS = 4
MAX_POOL_NBYTES = 256 << 30
IDLE_S = 600.0


@dataclass(slots=True)
class _Link:
    transport: Transport
    pool: Pool
    region: Region
    used_s: float
    asker: tuple[bytes, bytes] = (b"", b"")
    """Address and key of the other side's pool, once it was read."""
    peer: Peer | None = None


class LinkPeer:
    """The open links of this process, at most ``MAX_LINKS``; one idle for ``IDLE_S`` makes room."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or Device()
        self._links: dict[int, _Link] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def handle(self, message: wire.Message) -> wire.Message:
        """Answer one message.

        Raises:
            KVRDMAError: no such transport, memory or link, or too many links.
        """
        with self._lock:
            if isinstance(message, wire.OpenLink):
                return self._open(message)
            if isinstance(message, wire.CloseLink):
                self._close(message.link)
                return wire.LinkClosed()
            if isinstance(message, wire.DescribeLink):
                link = self._link(message.link)
                return wire.LinkKeys(link.transport.address(), link.region.key)
            if isinstance(message, wire.FillPool):
                self._link(message.link).pool.fill(message.generation)
                return wire.PoolFilled(message.generation)
            if isinstance(message, wire.PullLink):
                return self._pull(self._link(message.link), message)
            if isinstance(message, wire.DescribeHost):
                return describe_host()
        raise MessageError(
            f"a link test's server listens here, and does not answer {wire.askers_of(message)}: check the port"
        )

    def close(self) -> None:
        """Close every link. Idempotent."""
        with self._lock:
            for number in list(self._links):
                self._close(number)

    def _open(self, message: wire.OpenLink) -> wire.LinkOpened:
        self._make_room()
        if not 8 <= message.pool_nbytes <= MAX_POOL_NBYTES or message.pool_nbytes % 8:
            raise ConfigError(
                f"a pool of {message.pool_nbytes} bytes was asked for: need a multiple of 8 up to {MAX_POOL_NBYTES}"
            )
        transport = open_transport(message.transport, require_one_sided=message.require_one_sided)
        try:
            pool = allocate(message.pool_nbytes, self._device)
            pool.fill(1)
            region = transport.register(pool.addr, pool.nbytes, pool.device)
        except BaseException:
            transport.close()
            raise
        number = next(self._ids)
        self._links[number] = _Link(transport, pool, region, time.monotonic())
        return wire.LinkOpened(number, socket.gethostname()[:256], __version__)

    def _pull(self, link: _Link, message: wire.PullLink) -> wire.LinkPulled:
        case = Case(message.pattern, Shape(*message.shape), message.seed)
        if case.shape.pool_nbytes > link.pool.nbytes:
            raise ConfigError(
                f"a case of {case.shape.pool_nbytes} bytes was asked for, the pool has {link.pool.nbytes}"
            )
        if link.asker != (message.address, message.key):
            link.peer, link.asker = (
                link.transport.connect(message.address, [message.key]),
                (message.address, message.key),
            )
        assert link.peer is not None
        link.pool.poison()
        rows = rows_of(case, link.pool.addr)
        times = timed_read(link.transport, link.peer, rows, message.timeout_s)
        wrong = find_mismatch(link.pool.host_bytes(), case, message.generation)
        return wire.LinkPulled(
            times.blocking_s,
            times.total_s,
            times.rows_posted,
            link.peer.one_sided,
            link.peer.via[:256],
            str(wrong) if wrong else "",
        )

    def _make_room(self) -> None:
        now = time.monotonic()
        for number, link in list(self._links.items()):
            if now - link.used_s > IDLE_S:
                self._close(number)
        if len(self._links) >= MAX_LINKS:
            raise ControlError(f"this peer serves {MAX_LINKS} link tests already: try again later")

    def _link(self, number: int) -> _Link:
        if number not in self._links:
            raise ControlError(f"no link {number} here: the peer was restarted, or it was idle for {IDLE_S:g} s")
        link = self._links[number]
        link.used_s = time.monotonic()
        return link

    def _close(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is not None:
            link.transport.close()


def main() -> None:
    """Serve on loopback until stdin ends (the parent has closed it, or died) or the deadline passes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--deadline-s", type=float, required=True)
    options = parser.parse_args()
    peer = LinkPeer(Device.parse(options.device))
    server = SideChannelServer(Endpoint("127.0.0.1", 0), peer.handle, Config.from_env().secret)
    sys.stdout.write(f"{server.endpoint}\n")
    sys.stdout.flush()
    wait_readable(sys.stdin, options.deadline_s)
    server.close()
    peer.close()


if __name__ == "__main__":
    main()
