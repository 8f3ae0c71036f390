"""Secrets on the control channel: who is turned away, and what each side is told."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvrdma import wire
from kvrdma.errors import AuthenticationError, UnreachableError
from kvrdma.sidechannel import Endpoint
from kvrdma.sidechannel.curve import KeyPair, admit, key_pair
from kvrdma.sidechannel.greeting import mechanism_of
from tests.helpers.control import OTHER, SECRET, ask, serving


@pytest.mark.parametrize(
    ("servers", "clients", "says"),
    [
        (SECRET, OTHER, "KVRDMA_SECRET differs"),
        (SECRET, None, "one side only: this side has none"),
        (None, SECRET, "one side only: this side has, .* has none"),
    ],
    ids=["different", "client has none", "server has none"],
)
def test_a_wrong_secret_is_not_taken_for_an_absent_peer(servers: str | None, clients: str | None, says: str) -> None:
    with serving(secret=servers) as server:
        with pytest.raises(AuthenticationError, match=says):
            ask(server.endpoint, secret=clients, timeout_s=30)
        assert server.counts.answered == 0
        assert ask(server.endpoint, secret=servers) == wire.PoolFilled(7)


@pytest.mark.parametrize(
    ("mechanism", "clients", "error", "says"),
    [
        (b"CURVE", None, AuthenticationError, "one side only: this side has none, .* has one"),
        (b"NULL", SECRET, AuthenticationError, "one side only: this side has, .* has none"),
        (b"CURVE", SECRET, AuthenticationError, "KVRDMA_SECRET differs"),
        (b"NULL", None, UnreachableError, "another program speaks ZMQ there"),
        (None, None, UnreachableError, "closes every connection: no kvrdma"),
        (None, SECRET, UnreachableError, "closes every connection: no kvrdma"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_handshakes_that_end_in_silence_are_explained_by_the_listener_s_greeting(
    mechanism: bytes | None, clients: str | None, error: type[Exception], says: str
) -> None:
    with abrupt(mechanism) as endpoint, pytest.raises(error, match=says):
        ask(endpoint, secret=clients, timeout_s=30)


@contextmanager
def abrupt(mechanism: bytes | None) -> Iterator[Endpoint]:
    """Listen as a ZMQ does that has seen a peer's mechanism before its own has left: no more than a signature goes out.

    Whoever stops before naming a mechanism is answered in full, if there is one to name.
    """
    signature = b"\xff" + bytes(8) + b"\x7f"

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                return
            with stream, contextlib.suppress(OSError):
                stream.settimeout(10)
                stream.sendall(signature)
                heard = b""
                while len(heard) < 11:
                    heard += stream.recv(64) or b"\xff" * 64
                stream.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    heard += stream.recv(64)
                if len(heard) == 11 and mechanism is not None:
                    stream.sendall(b"\x03\x01" + mechanism.ljust(20, b"\x00") + bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield Endpoint("127.0.0.1", listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert not thread.is_alive()


def test_a_client_that_knows_only_the_server_s_public_key_is_turned_away() -> None:
    with serving(secret=SECRET) as server, raw_curve(server.endpoint, key_pair(OTHER, "client")) as dealer:
        dealer.send_multipart([b"12345678", wire.encode(wire.FillPool(1, 1))])
        deadline = time.monotonic() + 20
        while not server.counts.rejected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.counts.rejected >= 1
        assert server.counts.answered == 0


@contextmanager
def raw_curve(endpoint: Endpoint, pair: KeyPair) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, key_pair(SECRET, "server").public)
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, pair.private)
    dealer.connect(endpoint.url())
    try:
        yield dealer
    finally:
        context.destroy(0)


def test_keys_depend_on_secret_and_side() -> None:
    keys = {key_pair(secret, side).public for secret in (SECRET, OTHER) for side in ("server", "client")}
    assert len(keys) == 4
    assert key_pair(SECRET, "server") == key_pair(SECRET, "server")


@pytest.mark.parametrize("request_", [[], [b"1.0"], [b"1.0", b"7", b"", b"", b"", b"NULL"]], ids=str)
def test_a_malformed_authentication_request_is_denied(request_: list[bytes]) -> None:
    reply = admit(request_, key_pair(SECRET, "client").public)
    assert (len(reply), reply[2]) == (6, b"400")


@pytest.mark.parametrize(("secret", "mechanism"), [(None, "NULL"), (SECRET, "CURVE")])
def test_a_server_names_its_mechanism_to_whoever_stops_before_naming_theirs(secret: str | None, mechanism: str) -> None:
    with serving(secret=secret) as server:
        assert mechanism_of(server.endpoint, 10) == mechanism
    assert mechanism_of(server.endpoint, 10) is None
