"""Addresses and keys of ucx: nothing damaged, foreign or mixed up ever reaches UCX."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrdma.blob import seal, unseal
from kvrdma.errors import BlobError
from kvrdma.testing.target import PAGE, Reader
from kvrdma.transport import Device, Peer
from kvrdma_ucx import UcxTransport
from kvrdma_ucx.blobs import ADDRESS_KIND, KEY_KIND, UcxAddress, UcxKey

pytestmark = pytest.mark.needs("ucx")


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[UcxTransport, bytes, bytes]]:
    """Give a reading transport, and the address and a key of another one."""
    target, reader = UcxTransport(), UcxTransport()
    region = Reader.open(target, PAGE).region
    yield reader, target.address(), region.key
    reader.close()
    target.close()


def test_round_trip() -> None:
    address = UcxAddress("1.22.0", b"i" * 16, 0x7F0000001000, b"rkey", b"worker address")
    key = UcxKey(b"i" * 16, b"c" * 16, 7, 0x1000, 1 << 40, Device("cuda", 3), b"r" * 200)
    assert UcxAddress.unpack(address.pack()) == address
    assert UcxKey.unpack(key.pack(), 8) == key


@settings(max_examples=300, deadline=None)
@given(which=st.booleans(), data=st.data())
def test_damaged_blobs_are_refused(ends: tuple[UcxTransport, bytes, bytes], which: bool, data: st.DataObject) -> None:
    reader, address, key = ends
    blob = bytearray(address if which else key)
    if data.draw(st.booleans(), "truncate"):
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
    else:
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BlobError):
        reader.connect(bytes(blob) if which else address, [key if which else bytes(blob)])


@settings(max_examples=100, deadline=None)
@given(payload=st.binary(max_size=400), which=st.booleans())
def test_sealed_nonsense_is_refused(ends: tuple[UcxTransport, bytes, bytes], payload: bytes, which: bool) -> None:
    reader, address, _ = ends
    if which:
        with pytest.raises(BlobError):
            reader.connect(seal(ADDRESS_KIND, 1, payload), [])
    else:
        with pytest.raises(BlobError):
            reader.connect(address, [seal(KEY_KIND, 1, payload)])


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 0},
        {"slot": 16384},
        {"nbytes": 0},
        {"addr": (1 << 64) - 1},
        {"rkey": b""},
    ],
)
def test_forged_keys_are_refused(ends: tuple[UcxTransport, bytes, bytes], change: dict[str, object]) -> None:
    reader, address, key = ends
    forged = UcxKey.unpack(key, 16384)._replace(**change)  # type: ignore[arg-type]
    with pytest.raises(BlobError):
        reader.connect(address, [forged.pack()])


def test_blobs_of_other_transports_are_refused(ends: tuple[UcxTransport, bytes, bytes]) -> None:
    reader, address, key = ends
    with pytest.raises(BlobError, match="'ucx/key' where 'ucx/address' is needed"):
        reader.connect(key, [])
    with pytest.raises(BlobError, match="version 2, this side reads 1"):
        reader.connect(seal(ADDRESS_KIND, 2, unseal(ADDRESS_KIND, 1, address)), [])


def test_key_of_another_transport_is_refused(ends: tuple[UcxTransport, bytes, bytes]) -> None:
    reader, address, _ = ends
    other = UcxTransport()
    stranger = Reader.open(other, PAGE).region
    with pytest.raises(BlobError, match="key 0 is not from the transport of this address"):
        reader.connect(address, [stranger.key])
    other.close()


def test_intact_address_of_nobody_is_an_error(ends: tuple[UcxTransport, bytes, bytes]) -> None:
    reader, address, _ = ends
    changed = UcxAddress.unpack(address)._replace(instance=struct.pack("<QQ", 1, 2))
    with pytest.raises(BlobError, match="not from the transport"):
        reader.connect(changed.pack(), [ends[2]])
    peer: Peer = reader.connect(address, [ends[2]])
    assert peer.regions[0].nbytes == PAGE
    reader.disconnect(peer)
