"""What a peer can make the control channel's server hold: bounded, and nobody else notices."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvrdma import wire
from kvrdma.sidechannel import Endpoint, SideChannelClient, SideChannelServer, backlog
from kvrdma.sidechannel.server import Handler

MIB = 1 << 20


def closed(message: wire.Message) -> wire.Message:
    del message
    return wire.LinkClosed()


@contextmanager
def serving(handler: Handler = closed) -> Iterator[SideChannelServer]:
    server = SideChannelServer(Endpoint("127.0.0.1", 0), handler)
    try:
        yield server
    finally:
        server.close()


def ask(server: SideChannelServer) -> wire.Message:
    with SideChannelClient(server.endpoint) as client:
        return client.request(wire.CloseLink(0), 60)


@contextmanager
def zmtp(server: SideChannelServer) -> Iterator[socket.socket]:
    """A connection that has shaken hands as a DEALER."""
    with socket.create_connection(("127.0.0.1", server.endpoint.port), 60) as stream:
        stream.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        greeting = b""
        while len(greeting) < 64:
            greeting += stream.recv(64 - len(greeting))
        body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        stream.sendall(b"\x04" + bytes([len(body)]) + body)
        assert stream.recv(256)
        yield stream


def frame(nbytes: int, *, more: bool) -> bytes:
    return bytes([2 | more]) + struct.pack(">Q", nbytes) + bytes(nbytes)


def send_until(error: type[OSError], stream: socket.socket, part: bytes, most: int) -> int:
    """Give the bytes sent until that error."""
    for sent in range(0, most, len(part)):
        try:
            stream.sendall(part)
        except error:
            return sent
    raise AssertionError(f"{most} bytes were taken")


def ended(stream: socket.socket) -> bool:
    try:
        return stream.recv(1) == b""
    except ConnectionError:
        return True


def test_a_message_that_never_ends_ends_its_connection() -> None:
    with serving() as server:
        with zmtp(server) as stream:
            sent = send_until(ConnectionError, stream, frame(4 * MIB, more=True), 4 << 30)
        assert sent > backlog.MAX_CONNECTION_BYTES - 8 * MIB
        assert ask(server) == wire.LinkClosed()


def test_many_connections_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MAX_TOTAL_BYTES", 8 * MIB)
    part = frame(3 * MIB, more=True)
    with serving() as server, zmtp(server) as one, zmtp(server) as two, zmtp(server) as three:
        one.sendall(frame(1 * MIB, more=True))
        two.sendall(part)
        three.sendall(part + frame(2 * MIB, more=True))
        assert ended(three)  # the greediest, and it alone
        one.sendall(frame(8, more=False))
        two.sendall(frame(8, more=False))
        assert not ended(one)
        assert not ended(two)
        assert server.counts.malformed == 2


def test_requests_wait_at_their_sender_while_the_handler_is_busy() -> None:
    began, held = threading.Event(), threading.Event()

    def slow(message: wire.Message) -> wire.Message:
        began.set()
        held.wait(120)
        return closed(message)

    with serving(slow) as server, zmtp(server) as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB)
        stream.settimeout(1.0)
        number, small = bytes([1, 8]) + bytes(8), wire.encode(wire.CloseLink(0))
        stream.sendall(number + bytes([0, len(small)]) + small)
        assert began.wait(60)
        request = number + frame(4 * MIB, more=False)
        sent = send_until(TimeoutError, stream, request, 1 << 30)
        held.set()
    assert sent < backlog.MAX_CONNECTION_BYTES


def test_much_that_is_taken_is_not_too_much() -> None:
    with serving() as server, SideChannelClient(server.endpoint) as client:
        big = wire.DigestRows((1, 1), bytes(3 * MIB))
        for _ in range(2 * backlog.MAX_CONNECTION_BYTES // (3 * MIB)):
            assert client.request(big, 60) == wire.LinkClosed()
        time.sleep(0.2)
        assert client.request(big, 60) == wire.LinkClosed()


def test_answers_that_nobody_reads_are_dropped() -> None:
    """Each of 500 small requests brings a large answer."""

    def large(message: wire.Message) -> wire.Message:
        return wire.RowDigests(bytes(MIB // 4)) if isinstance(message, wire.DigestRows) else closed(message)

    context = zmq.Context()
    with serving(large) as server:
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, 1)
            dealer.connect(server.endpoint.url())
            for _ in range(500):
                dealer.send_multipart([bytes(8), wire.encode(wire.DigestRows((1, 1), b""))])
            deadline = time.monotonic() + 60
            while server.counts.answered < 500:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            got = 0
            while dealer.poll(500):
                dealer.recv_multipart()
                got += 1
        assert got < 200
        assert ask(server) == wire.LinkClosed()
    context.destroy(0)


def test_the_watch_ends_with_its_server() -> None:
    for _ in range(3):
        with serving() as server:
            assert ask(server) == wire.LinkClosed()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvrdma control")]


def test_who_is_shut_out_hears_of_it_also_with_its_window_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MAX_CONNECTION_BYTES", 0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = socket.create_connection(listening.getsockname())
        taken, _ = listening.accept()
    with peer, taken:
        watched = backlog._Connection(taken.dup())
        watch = object.__new__(backlog.BacklogWatch)
        watch.shut, watch._lock, watch._connections = 0, threading.Lock(), {0: watched}
        peer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                peer.send(bytes(1 << 20))
        peer.settimeout(20)
        watch._shut_the_greediest()
        while taken.recv(1 << 20):
            pass
        taken.close()
        watched.stream.close()
        with pytest.raises(ConnectionError):
            peer.sendall(bytes(64 << 20))
