"""Bounds what peers can make a server hold in memory, where ZMQ does not.

ZMQ limits the bytes of a frame and the messages in a queue, but not the frames of a message: it keeps those of an
unfinished one without end. Here the kernel says how many bytes each connection has brought since the server last
took a message from it, and a connection with too many of them is shut down.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvrdma.thread_start import start_thread

MAX_CONNECTION_BYTES = 64 << 20
"""More than the queue of well-formed messages and the kernel's buffers take together."""
MAX_TOTAL_BYTES = 256 << 20
"""Of all connections; beyond it those with the most go first."""

_LOOK_MS = 50
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_RECEIVED = struct.Struct("=Q")
_RECEIVED_AT = 128
"""``tcpi_bytes_received`` of Linux's ``struct tcp_info``; since 4.1."""
_RESET_AT_CLOSE = struct.pack("=ii", 1, 0)
"""``struct linger``: on, for 0 seconds."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Connection:
    stream: socket.socket
    """A descriptor of our own, so that it stays this connection's after ZMQ has closed its one."""
    taken: int = 0
    """Bytes it had brought when a message of it was taken last."""
    shut: bool = False

    def received(self) -> int:
        try:
            info = self.stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
        except OSError:
            return 0
        known = len(info) == _RECEIVED_AT + _RECEIVED.size
        return int(_RECEIVED.unpack_from(info, _RECEIVED_AT)[0]) if known else 0


class BacklogWatch:
    """Follows the connections of a listening socket in a thread of its own, which ends with that socket."""

    def __init__(self, listener: zmq.Socket[bytes]) -> None:
        """Start, before ``listener`` is bound."""
        self.shut = 0
        """Connections shut down."""
        self._connections: dict[int, _Connection] = {}
        self._lock = threading.Lock()
        self._monitor = listener.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._run, name="kvrdma control backlog", daemon=True)
        start_thread(self._thread)

    def taken(self, descriptor: int) -> None:
        """Note that a message of this connection (ZMQ's ``SRCFD``) was taken from the queue."""
        with self._lock:
            connection = self._connections.get(descriptor)
            if connection is not None:
                connection.taken = connection.received()

    def join(self, timeout_s: float) -> None:
        """Wait for the end, which comes when the listener's monitor is disabled."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._follow():
                self._shut_the_greediest()
        finally:
            with self._lock:
                for connection in self._connections.values():
                    connection.stream.close()
                self._connections.clear()
            self._monitor.close(0)

    def _follow(self) -> bool:
        """Take note of who comes and goes; false at the end."""
        timeout_ms = _LOOK_MS if self._connections else None
        while self._monitor.poll(timeout_ms):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                return False
            descriptor = int(event["value"])
            with self._lock:
                before = self._connections.pop(descriptor, None)
                if before is not None:
                    before.stream.close()
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._add(descriptor)
            timeout_ms = 0
        return True

    def _add(self, descriptor: int) -> None:
        try:
            stream = socket.socket(fileno=os.dup(descriptor))
        except OSError as error:  # closed already, or no descriptor is left
            _log.debug("connection %d is not watched: %s", descriptor, error)
            return
        self._connections[descriptor] = _Connection(stream)

    def _shut_the_greediest(self) -> None:
        with self._lock:
            live = [each for each in self._connections.values() if not each.shut]
            waiting = sorted(((each.received() - each.taken, each) for each in live), key=lambda pair: -pair[0])
            total = sum(nbytes for nbytes, _ in waiting)
            for nbytes, connection in waiting:
                if nbytes <= MAX_CONNECTION_BYTES and total <= MAX_TOTAL_BYTES:
                    break
                connection.shut = True
                total -= nbytes
                self.shut += 1
                _log.warning("control channel: a peer sent %d bytes that nobody took; it is shut out", nbytes)
                try:
                    # A reset as the last descriptor closes: a peer whose window was just shut would hear nothing until
                    # the kernel forgets the connection, after a minute.
                    connection.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
                    connection.stream.shutdown(socket.SHUT_RDWR)
                except OSError as error:
                    _log.debug("it had gone by itself: %s", error)
