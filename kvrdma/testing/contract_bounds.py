"""Contract: what does not fit is refused before anything is posted, and damaged blobs are recognised."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvrdma.blob import seal
from kvrdma.errors import BlobError, ConnectError, RegistrationError, RowsError
from kvrdma.testing import target as at
from kvrdma.testing.contract_base import ContractBase
from kvrdma.testing.target import PAGE, done
from kvrdma.transport import Device, Region

TOP = (1 << 64) - 1


class BoundsContract(ContractBase):
    """Refusals, all with the reader's memory untouched."""

    @pytest.mark.parametrize(
        ("piece", "message"),
        [
            ((-1, 0, 0, 8), "local"),
            ((4 * PAGE - 7, 0, 0, 8), "local"),
            ((4 * PAGE, 0, 0, 1), "local"),
            ((0, 0, 2 * PAGE - 7, 8), "remote region of 8192 bytes"),
            ((0, 0, 2 * PAGE + 1, 0), "remote region of 8192 bytes"),
            ((0, 0, TOP, 8), "remote region of 8192 bytes"),
            ((0, 0, 8, TOP), "remote region of 8192 bytes"),
            ((0, 1, 0, 8), "no .*region"),
            ((0, TOP, 0, 8), "no .*region"),
            ((0, 1 << 32, 0, 8), "no .*region"),
        ],
    )
    def test_row_out_of_bounds(self, piece: tuple[int, int, int, int], message: str) -> None:
        reader, _, peer, sources = self.link(4 * PAGE, [2 * PAGE])
        good = reader.rows([(0, 0, 0, 16)] * 5)
        bad = np.array([[(reader.buffer.ctypes.data + piece[0]) & TOP, *piece[1:]]], np.uint64)
        with pytest.raises(RowsError, match=f"(?s)row 5 .*{message}"):
            reader.transport.read(peer, np.concatenate((good, bad, good)))
        done(reader.read(peer, reader.rows([])))
        reader.check(reader.rows([]), sources)

    def test_local_address_that_overflows(self) -> None:
        reader, _, peer, _ = self.link(PAGE, [2 * PAGE])
        with pytest.raises(RowsError, match="row 0"):
            reader.transport.read(peer, np.array([[TOP - 3, 0, 0, 8]], np.uint64))

    @pytest.mark.parametrize("rows", [[[1, 2, 3]], [1, 2, 3, 4], [[0.5, 0, 0, 1]], [[-1, 0, 0, 1]]])
    def test_rows_of_another_shape_or_type(self, rows: list[object]) -> None:
        reader, _, peer, _ = self.link(PAGE, [PAGE])
        with pytest.raises(RowsError):
            reader.transport.read(peer, np.array(rows))

    def test_destination_that_was_deregistered(self) -> None:
        reader, _, peer, _ = self.link(PAGE, [PAGE])
        reader.transport.deregister(reader.region)
        with pytest.raises(RowsError, match="row 0"):
            reader.transport.read(peer, reader.rows([(0, 0, 0, 8)]))

    @pytest.mark.parametrize(("nbytes", "device"), [(0, Device()), (8, Device("cuda", 99))])
    def test_registration_refused(self, nbytes: int, device: Device) -> None:
        buffer = np.zeros(8, np.uint8)
        with pytest.raises(RegistrationError):
            self.open().register(buffer.ctypes.data, nbytes, device)

    def test_deregister_twice(self) -> None:
        reader = self.reader(PAGE)
        reader.transport.deregister(reader.region)
        with pytest.raises(RegistrationError):
            reader.transport.deregister(reader.region)

    def test_deregister_what_was_never_registered(self) -> None:
        with pytest.raises(RegistrationError):
            self.open().deregister(Region(999_999, PAGE, PAGE, Device(), b""))

    @pytest.mark.parametrize("what", ["address", "key"])
    def test_truncated_blob(self, what: str) -> None:
        address, key = self._blobs()
        transport = self.open()
        blob = address if what == "address" else key
        for length in range(len(blob)):
            with pytest.raises(BlobError):
                transport.connect(*self._with(what, blob[:length], address, key))

    @pytest.mark.parametrize("what", ["address", "key"])
    def test_bit_flipped_blob(self, what: str) -> None:
        address, key = self._blobs()
        transport = self.open()
        blob = address if what == "address" else key
        for bit in range(8 * len(blob)):
            damaged = bytearray(blob)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(BlobError):
                transport.connect(*self._with(what, bytes(damaged), address, key))

    @pytest.mark.parametrize("what", ["address", "key"])
    def test_foreign_blob(self, what: str) -> None:
        address, key = self._blobs()
        transport = self.open()
        own = f"{type(transport).name}/{what}"
        foreign = [b"", b"KVRD", os.urandom(200), key if what == "address" else address, address + key]
        foreign += [seal("other/" + what, 1, os.urandom(64)), seal(own, 1, b""), seal(own, 1, os.urandom(64))]
        for blob in foreign:
            with pytest.raises((BlobError, ConnectError)):
                transport.connect(*self._with(what, blob, address, key))

    def test_key_of_another_process(self) -> None:
        address, _ = self._blobs()
        _, stranger = self._blobs()
        with pytest.raises(BlobError):
            self.open().connect(address, [stranger])

    def test_connect_without_keys(self) -> None:
        reader, target, _, _ = self.link(PAGE, [PAGE])
        peer = reader.transport.connect(target.call(at.exports)[0], [])
        assert peer.regions == ()
        with pytest.raises(RowsError, match=r"no .*region"):
            reader.transport.read(peer, reader.rows([(0, 0, 0, 1)]))

    def _blobs(self) -> tuple[bytes, bytes]:
        address, keys = self.target([PAGE]).call(at.exports)
        return address, keys[0]

    @staticmethod
    def _with(what: str, blob: bytes, address: bytes, key: bytes) -> tuple[bytes, list[bytes]]:
        return (blob, [key]) if what == "address" else (address, [blob])
