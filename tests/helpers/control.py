"""A control channel of a test: a server that echoes, and one question."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvrdma import wire
from kvrdma.sidechannel import Endpoint, SideChannelClient, SideChannelServer
from kvrdma.sidechannel.server import Handler

SECRET, OTHER = "correct horse battery", "incorrect horse battery"
ANY = Endpoint("127.0.0.1", 0)


def echo(message: wire.Message) -> wire.Message:
    assert isinstance(message, wire.FillPool)
    return wire.PoolFilled(message.generation)


@contextmanager
def serving(handler: Handler = echo, secret: str | None = None, bind: Endpoint = ANY) -> Iterator[SideChannelServer]:
    server = SideChannelServer(bind, handler, secret)
    try:
        yield server
    finally:
        server.close()


def ask(endpoint: Endpoint, generation: int = 7, secret: str | None = None, timeout_s: float = 10.0) -> wire.Message:
    with SideChannelClient(endpoint, secret) as client:
        return client.request(wire.FillPool(1, generation), timeout_s)
