"""The outbox: at least once, waiting for nobody, through restarts and strangers at the same port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvrdma.errors import MessageError
from kvrdma.mailbox import Outbox
from kvrdma.sidechannel import Endpoint, SideChannelServer
from kvrdma.wire import Goodbye, Heartbeat, Message, Noted
from tests.helpers.ports import fixed_port

ANY = Endpoint("127.0.0.1", 0)


class Mailbox:
    """A server that keeps what it was told; it answers the first ``refuse`` messages with an error."""

    def __init__(self, bind: Endpoint = ANY, refuse: int = 0) -> None:
        self.got: list[Message] = []
        self.refuse = refuse
        self.server = SideChannelServer(bind, self.take)

    def take(self, message: Message) -> Message:
        self.got.append(message)
        if len(self.got) <= self.refuse:
            raise MessageError("refused")
        return Noted()


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    outbox = Outbox()
    yield outbox
    outbox.close()


def until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_messages_arrive_in_order_and_are_forgotten(outbox: Outbox) -> None:
    box = Mailbox()
    for number in range(200):
        outbox.send(box.server.endpoint, Goodbye("c", number), 10)
    until(lambda: outbox.pending() == 0)
    assert box.got == [Goodbye("c", number) for number in range(200)]
    assert outbox.lost == 0
    box.server.close()


def test_an_error_is_an_answer_too(outbox: Outbox) -> None:
    box = Mailbox(refuse=1)
    outbox.send(box.server.endpoint, Goodbye("c", 1), 10)
    until(lambda: outbox.pending() == 0)
    assert box.got == [Goodbye("c", 1)]
    box.server.close()


def test_a_message_waits_for_its_receiver_to_come_back(outbox: Outbox) -> None:
    endpoint = Endpoint("127.0.0.1", fixed_port())
    first = Mailbox(endpoint)
    first.server.close()
    outbox.send(endpoint, Goodbye("c", 1), 20)
    time.sleep(0.3)
    second = Mailbox(endpoint)
    until(lambda: second.got)
    assert second.got[0] == Goodbye("c", 1)
    until(lambda: outbox.pending() == 0)
    second.server.close()


def test_a_message_that_was_given_up_does_not_come_late(outbox: Outbox) -> None:
    endpoint = Endpoint("127.0.0.1", fixed_port())
    first = Mailbox(endpoint)
    first.server.close()
    for number in range(3):
        outbox.send(endpoint, Goodbye("c", number), 0.1)
    until(lambda: outbox.lost == 3)
    outbox.send(endpoint, Goodbye("c", 3), 30)
    second = Mailbox(endpoint)
    until(lambda: outbox.pending() == 0)
    time.sleep(0.2)
    assert second.got == [Goodbye("c", 3)]
    second.server.close()


def test_a_mailbox_that_does_not_read_gets_nothing_late(outbox: Outbox) -> None:
    """More than the systems between buffer: the rest waits on this side, and dies there when it is given up."""
    held = threading.Event()

    class Stuck(Mailbox):
        def take(self, message: Message) -> Message:
            held.wait(60)
            return super().take(message)

    box = Stuck()
    leases = tuple((slot, 1) for slot in range(65536, 2 * 65536 - 1))
    for number in range(120):
        outbox.send(box.server.endpoint, Heartbeat((*leases, (number, 1))), 2)
    until(lambda: outbox.lost == 120, 60)
    outbox.send(box.server.endpoint, Goodbye("c", 1), 60)
    held.set()
    until(lambda: outbox.pending() == 0, 60)
    assert Goodbye("c", 1) in box.got
    assert len(box.got) < 100
    box.server.close()


def test_a_dead_mailbox_costs_a_bounded_time_and_others_nothing(outbox: Outbox) -> None:
    alive = Mailbox()
    outbox.send(Endpoint("127.0.0.1", 1), Goodbye("c", 0), 0.5)
    outbox.send(alive.server.endpoint, Goodbye("c", 1), 10)
    until(lambda: alive.got, 5)
    until(lambda: outbox.pending() == 0)
    assert outbox.lost == 1
    alive.server.close()


def test_a_stranger_at_the_port_does_not_close_it_for_ever(outbox: Outbox) -> None:
    """ZMQ gives a connection up for good whose other side speaks another protocol."""
    endpoint = Endpoint("127.0.0.1", fixed_port())
    with socket.create_server((endpoint.host, endpoint.port)) as server:

        def be_strange() -> None:
            connection, _ = server.accept()
            connection.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\0" + b"STRANGE".ljust(52, b"\0"))
            time.sleep(0.3)
            connection.close()

        stranger = threading.Thread(target=be_strange)
        stranger.start()
        outbox.send(endpoint, Goodbye("c", 1), 20)
        stranger.join()
    box = Mailbox(endpoint)
    until(lambda: box.got)
    until(lambda: outbox.pending() == 0)
    assert outbox.lost == 0
    box.server.close()


def test_a_closed_outbox_takes_nothing() -> None:
    outbox = Outbox()
    outbox.close()
    outbox.close()
    outbox.send(ANY, Goodbye("c", 1), 1)
    assert (outbox.lost, outbox.pending()) == (1, 0)
