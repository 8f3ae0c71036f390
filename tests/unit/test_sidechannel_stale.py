"""Requests that were given up: they end in time, and a server that comes later does not carry them out."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping

import pytest
import zmq

from kvrdma import wire
from kvrdma.errors import UnreachableError
from kvrdma.sidechannel import Endpoint, SideChannelClient, SideChannelServer
from tests.helpers.ports import fixed_port


@pytest.fixture
def reserved() -> Iterator[socket.socket]:
    """A port where nobody listens, and that nobody else takes."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound


def endpoint_of(bound: socket.socket) -> Endpoint:
    return Endpoint("127.0.0.1", int(bound.getsockname()[1]))


def test_any_number_of_requests_to_nobody_ends_in_time(reserved: socket.socket) -> None:
    ended = threading.Event()

    def ask() -> None:
        with SideChannelClient(endpoint_of(reserved)) as client:
            for _ in range(1100):  # more than ZMQ queues
                with pytest.raises(UnreachableError):
                    client.request(wire.CloseLink(0), 0.001)
        ended.set()

    threading.Thread(target=ask, daemon=True).start()  # without the fix it never ends
    assert ended.wait(60)


def test_a_server_that_comes_later_does_not_see_requests_that_were_given_up(reserved: socket.socket) -> None:
    seen: list[wire.Message] = []

    def note(message: wire.Message) -> wire.Message:
        seen.append(message)
        return wire.LinkClosed()

    with SideChannelClient(endpoint_of(reserved)) as client:
        for number in range(5):
            with pytest.raises(UnreachableError, match="nobody listens"):
                client.request(wire.CloseLink(number), 0.05)
        reserved.close()
        server = SideChannelServer(client.endpoint, note)
        try:
            assert client.request(wire.CloseLink(99), 30) == wire.LinkClosed()
            time.sleep(0.2)
            assert seen == [wire.CloseLink(99)]
        finally:
            server.close()


def test_a_client_goes_on_with_the_next_server_at_the_same_port() -> None:
    def answer(message: wire.Message) -> wire.Message:
        del message
        return wire.LinkClosed()

    first = SideChannelServer(Endpoint("127.0.0.1", fixed_port()), answer)
    with SideChannelClient(first.endpoint) as client:
        assert client.request(wire.CloseLink(1), 30) == wire.LinkClosed()
        first.close()
        with pytest.raises(UnreachableError, match="closed the control connection"):
            client.request(wire.CloseLink(2), 30)
        with pytest.raises(UnreachableError, match="nobody listens"):
            client.request(wire.CloseLink(3), 0.2)
        second = SideChannelServer(first.endpoint, answer)
        try:
            assert client.request(wire.CloseLink(4), 30) == wire.LinkClosed()
        finally:
            second.close()


def test_what_was_meant_for_a_server_that_has_gone_is_not_sent_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has connected to the next one by itself, and has not yet heard of the first one's end."""
    seen: list[wire.Message] = []
    asked = threading.Event()

    def note(message: wire.Message) -> wire.Message:
        seen.append(message)
        asked.set()
        return wire.LinkClosed()

    first = SideChannelServer(Endpoint("127.0.0.1", fixed_port()), note)
    with SideChannelClient(first.endpoint) as client:
        assert client.request(wire.CloseLink(1), 30) == wire.LinkClosed()
        first.close()
        second = SideChannelServer(first.endpoint, note)
        try:
            assert client._socket.poll(30_000, zmq.POLLOUT)
            asked.clear()
            follow = client._follow

            def slowly(event: Mapping[str, object], deadline: float) -> None:
                asked.wait(0.2)  # whatever was sent by now is carried out
                follow(event, deadline)

            monkeypatch.setattr(client, "_follow", slowly)
            with pytest.raises(UnreachableError, match="closed the control connection"):
                client.request(wire.CloseLink(2), 30)
            assert client.request(wire.CloseLink(3), 30) == wire.LinkClosed()
            assert seen == [wire.CloseLink(1), wire.CloseLink(3)]
        finally:
            second.close()
