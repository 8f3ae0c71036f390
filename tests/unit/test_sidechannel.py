"""The control channel: answers, and everything a peer can do wrong."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvrdma import wire
from kvrdma.errors import (
    ConfigError,
    ControlError,
    ProtocolVersionError,
    RegistrationError,
    UnreachableError,
)
from kvrdma.sidechannel import Endpoint, SideChannelClient, SideChannelServer
from tests.helpers.control import ANY, SECRET, ask, echo, serving


@contextmanager
def raw(endpoint: Endpoint) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 10_000)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(endpoint.url())
    try:
        yield dealer
    finally:
        context.destroy(0)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("10.0.0.1:7000", Endpoint("10.0.0.1", 7000)),
        ("localhost:0", Endpoint("localhost", 0)),
        ("[::1]:65535", Endpoint("::1", 65535)),
    ],
)
def test_endpoints_are_read_and_written(text: str, endpoint: Endpoint) -> None:
    assert Endpoint.parse(text) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:65536", "::1:7000", "host:-1", "a b:c", "[::1]"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        Endpoint.parse(text)


def test_loopback_is_told_from_the_world() -> None:
    assert [Endpoint(host, 1).is_loopback() for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost")] == [True] * 4
    assert [Endpoint(host, 1).is_loopback() for host in ("0.0.0.0", "::", "192.0.2.1")] == [False] * 3


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_request_is_answered(secret: str | None) -> None:
    with serving(secret=secret) as server:
        assert ask(server.endpoint, 9, secret) == wire.PoolFilled(9)
        assert (server.counts.answered, server.counts.malformed) == (1, 0)


def test_many_requests_of_one_client_are_answered_in_turn() -> None:
    with serving() as server, SideChannelClient(server.endpoint) as client:
        for generation in range(1, 101):
            assert client.request(wire.FillPool(1, generation), 10) == wire.PoolFilled(generation)


def test_ipv6() -> None:
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):  # noqa: PTH110
        pytest.skip("this host has no IPv6")
    with serving(bind=Endpoint("::1", 0)) as server:
        assert str(server.endpoint).startswith("[::1]:")
        assert ask(server.endpoint) == wire.PoolFilled(7)


def test_nobody_there() -> None:
    with socket.socket() as reserved:  # bound, not listening: nothing else takes the port
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        with pytest.raises(
            UnreachableError, match=rf"nobody listens at 127\.0\.0\.1:{port} \(tried for 0\.3 s"
        ) as caught:
            ask(Endpoint("127.0.0.1", port), timeout_s=0.3)
        assert "link-test" not in str(caught.value)  # an engine asks here as well


def test_nobody_there_is_given_up_early_by_who_does_not_wait_for_a_start() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", reserved.getsockname()[1])
        with SideChannelClient(endpoint, refused_s=0.1) as client:
            for _ in range(2):
                with pytest.raises(
                    UnreachableError, match=rf"nobody listens at {endpoint} \(refused, or no way there, for 0\.\d s\)"
                ):
                    client.request(wire.FillPool(1, 7), 3600)


def test_a_server_that_starts_late_is_waited_for() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", reserved.getsockname()[1])
    with SideChannelClient(endpoint, refused_s=60) as client:
        with pytest.raises(UnreachableError, match=r"tried for 0\.3 s"):
            client.request(wire.FillPool(1, 7), 0.3)
        with serving(bind=endpoint):
            assert client.request(wire.FillPool(1, 7), 30) == wire.PoolFilled(7)


def test_an_unknown_host() -> None:
    with pytest.raises(UnreachableError, match=r"'no\.such\.host\.invalid' cannot be looked up"):
        SideChannelClient(Endpoint("no.such.host.invalid", 1))


@pytest.mark.parametrize(
    ("says", "message"),
    [(b"", "was silent for 0.5 s"), (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, "127.0.0.1:")],
    ids=["silent", "another protocol"],
)
def test_something_else_listens(says: bytes, message: str) -> None:
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.sendall(says)
                accepted.append(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(UnreachableError, match=message):
            ask(Endpoint("127.0.0.1", listener.getsockname()[1]), timeout_s=0.5)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert not thread.is_alive()
    for connection in accepted:
        connection.close()


def test_a_server_that_goes_away_ends_the_wait_at_once() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def vanish() -> None:
        router.recv_multipart()
        context.destroy(0)

    thread = threading.Thread(target=vanish)
    thread.start()
    with pytest.raises(UnreachableError, match="its process has ended"):
        ask(Endpoint("127.0.0.1", port), timeout_s=60)
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "parts",
    [[], [b""], [b"\x00" * 8], [b"\x00" * 8, b"garbage"], [b"\x00" * 8, b""], [b"a", b"b", b"c"], [b"x" * 100_000]],
    ids=lambda parts: str(len(parts)) + " parts",
)
def test_a_malformed_frame_is_counted_and_answered_and_the_listener_lives_on(parts: list[bytes]) -> None:
    with serving() as server:
        with raw(server.endpoint) as dealer:
            dealer.send_multipart(parts or [b""])
            reply = wire.decode(dealer.recv_multipart()[-1])
            assert isinstance(reply, wire.Failed)
            assert reply.error == "MessageError"
            assert server.counts.malformed == 1
        assert ask(server.endpoint) == wire.PoolFilled(7)


def test_a_frame_beyond_the_limit_breaks_only_its_connection() -> None:
    with serving() as server:
        with raw(server.endpoint) as dealer:
            dealer.send_multipart([b"\x00" * 8, bytes(wire.MAX_FRAME_BYTES + 1)])
            dealer.setsockopt(zmq.RCVTIMEO, 300)
            with pytest.raises(zmq.Again):
                dealer.recv_multipart()
        assert server.counts.answered == 0
        assert ask(server.endpoint) == wire.PoolFilled(7)


def test_raw_bytes_that_are_not_zmq_do_no_harm() -> None:
    with serving() as server:
        for _ in range(20):
            with socket.create_connection((server.endpoint.host, server.endpoint.port)) as stream:
                stream.sendall(os.urandom(1000))
        assert ask(server.endpoint) == wire.PoolFilled(7)


def test_a_client_of_another_version_is_told() -> None:
    with serving() as server:
        with raw(server.endpoint) as dealer:
            dealer.send_multipart([b"\x00" * 8, b"KVCT" + (99).to_bytes(2, "little") + b"\x80"])
            reply = wire.decode(dealer.recv_multipart()[-1])
        assert isinstance(reply, wire.Failed)
        assert reply.error == "ProtocolVersionError"
        assert "99" in reply.message


def test_the_client_tells_the_server_s_version() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def from_the_future() -> None:
        identity, request, _ = router.recv_multipart()
        router.send_multipart([identity, request, b"KVCT" + (99).to_bytes(2, "little") + b"whatever"])

    thread = threading.Thread(target=from_the_future)
    thread.start()
    with pytest.raises(ProtocolVersionError, match=f"127.0.0.1:{port}: the other side speaks control protocol 99"):
        ask(Endpoint("127.0.0.1", port))
    thread.join(10)
    context.destroy(0)


def test_an_error_of_the_handler_comes_home_as_its_class() -> None:
    def refuse(message: wire.Message) -> wire.Message:
        raise RegistrationError("no memory of this process")

    with serving(refuse) as server:
        with pytest.raises(RegistrationError, match=f"{server.endpoint}: no memory of this process"):
            ask(server.endpoint)
        assert server.alive


@pytest.mark.parametrize("name", ["NoSuchError", "annotations", "KVRDMAError.__init__"])
def test_an_error_class_unknown_here_is_a_control_error(name: str) -> None:
    def answer(message: wire.Message) -> wire.Message:
        return wire.Failed(name, "odd")

    with serving(answer) as server, pytest.raises(ControlError, match="odd"):
        ask(server.endpoint)


def test_system_errors_of_the_handler_are_answered() -> None:
    def refuse(message: wire.Message) -> wire.Message:
        raise MemoryError

    with serving(refuse) as server, pytest.raises(ControlError, match="MemoryError"):
        ask(server.endpoint)


def test_a_defect_of_the_handler_comes_out_of_close() -> None:
    def broken(message: wire.Message) -> wire.Message:
        raise ZeroDivisionError("a defect")

    server = SideChannelServer(ANY, broken)
    with pytest.raises(UnreachableError):
        ask(server.endpoint)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        server.close()
    server.close()


def test_a_late_answer_is_not_taken_for_the_next() -> None:
    held = threading.Event()

    def slow_once(message: wire.Message) -> wire.Message:
        assert isinstance(message, wire.FillPool)
        if message.generation == 1:
            held.wait(30)
        return wire.PoolFilled(message.generation)

    with serving(slow_once) as server, SideChannelClient(server.endpoint) as client:
        with pytest.raises(UnreachableError, match=r"gave no answer within 0\.2 s"):
            client.request(wire.FillPool(1, 1), 0.2)
        held.set()
        assert client.request(wire.FillPool(1, 2), 10) == wire.PoolFilled(2)


def test_beyond_loopback_needs_a_secret_or_consent() -> None:
    everywhere = Endpoint("0.0.0.0", 0)
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:0 can be reached from other hosts: set KVRDMA_SECRET"):
        SideChannelServer(everywhere, echo)
    for server in (
        SideChannelServer(everywhere, echo, SECRET),
        SideChannelServer(everywhere, echo, insecure=True),
    ):
        server.close()


def test_a_taken_port_is_named() -> None:
    with serving() as server, pytest.raises(ConfigError, match=f"cannot listen at {server.endpoint}: Address"):
        SideChannelServer(server.endpoint, echo)


def test_close_twice_leaves_no_thread_and_no_file() -> None:
    ask_one(SideChannelServer(ANY, echo, SECRET))
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(10):
        ask_one(SideChannelServer(ANY, echo, SECRET))
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= files + 2  # noqa: PTH208


def ask_one(server: SideChannelServer) -> None:
    assert ask(server.endpoint, secret=SECRET) == wire.PoolFilled(7)
    server.close()
    server.close()
