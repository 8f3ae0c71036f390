"""What ucx takes for a region or a peer of its own, and when a region is busy."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from kvrdma.errors import PeerLostError, RegionBusyError, RegistrationError, TransportClosedError
from kvrdma.testing import target as at
from kvrdma.testing.target import PAGE, Reader, done
from kvrdma.transport import Device, PeerId
from kvrdma_ucx import UcxTransport

pytestmark = pytest.mark.needs("ucx")

BIG = 64 << 20


def _link(nbytes: int = PAGE) -> tuple[SimpleNamespace, Reader]:
    target = SimpleNamespace()
    at.open_target(target, UcxTransport, [nbytes], 1)
    return target, Reader.open(UcxTransport(), nbytes)


def _close(*links: tuple[SimpleNamespace, Reader]) -> None:
    for target, reader in links:
        reader.transport.close()
        target.transport.close()


def test_a_region_is_busy_while_a_read_writes_into_it_through_another() -> None:
    target, reader = _link(BIG)
    transport, addr = reader.transport, reader.region.addr
    inside = transport.register(addr, BIG // 2, Device())
    crossing = transport.register(addr + BIG // 2 - PAGE, 2 * PAGE, Device())
    beside = transport.register(addr + BIG // 2, BIG // 4, Device())
    empty_row = transport.register(addr + BIG - PAGE, PAGE, Device())
    peer = transport.connect(*at.exports(target))
    rows = reader.rows([(BIG - PAGE // 2, 0, 0, 0), (0, 0, 0, BIG // 2)])
    read = transport.read(peer, rows)
    for busy in (inside, crossing, reader.region):
        with pytest.raises(RegionBusyError, match="poll first"):
            transport.deregister(busy)
    for idle in (beside, empty_row):
        transport.deregister(idle)
    done(reader.finish(read))
    for ended in (inside, crossing, reader.region):
        transport.deregister(ended)
    _close((target, reader))


def test_a_region_of_another_transport_is_not_deregistered() -> None:
    ours, theirs = _link(), _link()
    own, transport = ours[1].region, ours[1].transport
    assert own.id == theirs[1].region.id
    for foreign in (
        theirs[1].region,
        dataclasses.replace(own, id=-1),
        dataclasses.replace(own, id=1 << 70),
        dataclasses.replace(own, nbytes=own.nbytes - 1),
    ):
        with pytest.raises(RegistrationError, match="not a region of this transport"):
            transport.deregister(foreign)
    transport.deregister(own)
    with pytest.raises(RegistrationError, match="deregistered before"):
        transport.deregister(own)
    transport.close()
    with pytest.raises(TransportClosedError):
        transport.deregister(theirs[1].region)
    _close(ours, theirs)


def test_a_peer_of_another_transport_is_neither_read_nor_disconnected() -> None:
    links = _link(), _link()
    (ours, reader), (theirs, other) = links
    peer = reader.transport.connect(*at.exports(ours))
    foreign = other.transport.connect(*at.exports(theirs))
    assert foreign == peer
    rows = reader.rows([(0, 0, 0, PAGE)])
    for stranger in (foreign, *(dataclasses.replace(peer, id=PeerId(number)) for number in (-1, 0, 1 << 70))):
        with pytest.raises(PeerLostError, match="not a peer of this transport"):
            reader.transport.read(stranger, rows)
        reader.transport.disconnect(stranger)
    assert (reader.buffer == at.POISON).all()
    done(reader.read(peer, rows))
    reader.check(rows, ours.buffers)
    reader.transport.disconnect(peer)
    with pytest.raises(PeerLostError, match="was disconnected"):
        reader.transport.read(peer, rows)
    reader.transport.close()
    with pytest.raises(TransportClosedError):
        reader.transport.read(foreign, rows)
    _close(*links)
