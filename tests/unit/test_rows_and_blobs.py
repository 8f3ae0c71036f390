"""Rows and blobs: the pure parts of the transport contract, against slow and obvious code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrdma import errors
from kvrdma.blob import seal, unseal
from kvrdma.errors import BlobError, ConfigError, RowsError, TransportUnavailableError
from kvrdma.rows import as_rows, check_rows, merge_rows
from kvrdma.testing import target as at
from kvrdma.testing.target import Reader, done
from kvrdma.transport import Device, Peer, completions_of, installed_transports, open_transport

PIECES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 1), st.integers(0, 12), st.integers(0, 2)), max_size=24)


def _bytes_moved(rows: list[list[int]]) -> set[tuple[int, int, int]]:
    return {(local + i, region, offset + i) for local, region, offset, length in rows for i in range(length)}


@given(PIECES)
def test_merging_moves_the_same_bytes(pieces: list[tuple[int, int, int, int]]) -> None:
    merged = merge_rows(as_rows(pieces)).tolist()
    assert _bytes_moved(merged) == _bytes_moved([list(piece) for piece in pieces])
    assert len(merged) <= len([piece for piece in pieces if piece[3]])


@given(st.permutations(range(20)), st.sets(st.integers(1, 19)))
def test_merging_finds_every_pair_in_any_order(order: list[int], cuts: set[int]) -> None:
    """Pieces of one run, shuffled, with gaps of one byte at `cuts`: as many rows as runs."""
    place = np.cumsum([8 + (i in cuts) for i in range(20)]).tolist()
    rows = as_rows([(place[i], 0, place[i] + 64, 8) for i in order])
    assert len(merge_rows(rows)) == 1 + len(cuts)


@settings(max_examples=200, deadline=None)
@given(st.permutations(range(24)), st.permutations(range(24)), st.integers(1, 24), st.sampled_from([1, 8, 4096]))
def test_native_merging_equals_the_definition(local: list[int], remote: list[int], count: int, block: int) -> None:
    reader, peer = _native_pair()
    pieces = [(a * block, 0, b * block, block) for a, b in zip(local[:count], remote[:count], strict=True)]
    rows = reader.rows(pieces)
    assert done(reader.read(peer, rows)).rows_posted == len(merge_rows(rows))
    reader.check(rows, [at.pattern(1, 24 * 4096)])
    reader.buffer[:] = at.POISON


_pair: list[tuple[Reader, Peer, Reader]] = []


def _native_pair() -> tuple[Reader, Peer]:
    if not _pair:
        owner = Reader.open(open_transport("cma"), 24 * 4096)
        owner.buffer[:] = at.pattern(1, 24 * 4096)
        reader = Reader.open(open_transport("cma"), 24 * 4096)
        _pair.append((reader, reader.transport.connect(owner.transport.address(), [owner.region.key]), owner))
    return _pair[0][:2]


@pytest.mark.parametrize(
    "given",
    [5, None, np.empty((0, 3), np.uint64), np.empty((2, 3), np.uint64)],
    ids=["int", "None", "0 of 3", "2 of 3"],
)
def test_what_is_no_rows_is_refused(given: Any) -> None:  # noqa: ANN401
    with pytest.raises(RowsError, match="need"):
        as_rows(given)


def test_rows_keep_values_above_2_63() -> None:
    top = (1 << 64) - 1
    assert as_rows([(top, 0, 0, 0)]).tolist() == [[top, 0, 0, 0]]


def test_check_names_row_values_and_bound() -> None:
    with pytest.raises(RowsError, match=r"row 1 \(local 0x64, region 0, offset 90, length 20\): ends at byte 110 of a"):
        check_rows(as_rows([(100, 0, 0, 1), (100, 0, 90, 20)]), [(100, 50)], [100])


def test_blob_round_trip() -> None:
    assert unseal("x/key", 3, seal("x/key", 3, b"payload")) == b"payload"
    assert unseal("x/key", 3, seal("x/key", 3, b"")) == b""


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "0 bytes"),
        (b"x" * 40, "not from kvrdma"),
        (seal("y/key", 1, b"abc"), "kind 'y/key' where 'x/key'"),
        (seal("x/key", 2, b"abc"), "version 2, this side reads 1"),
        (seal("x/key", 1, b"abc") + b"!", "32 bytes where its header says 31"),
        (seal("x/key", 1, b"abc")[:-5] + b"Z" + seal("x/key", 1, b"abc")[-4:], "checksum"),
        (b"x" * (2 << 20), "need 28 to 1048576"),
    ],
)
def test_blob_refused(blob: bytes, message: str) -> None:
    with pytest.raises(BlobError, match=message):
        unseal("x/key", 1, blob)


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:x", "cpu:1", "cuda:-1", "CPU"])
def test_unknown_device(text: str) -> None:
    with pytest.raises(ConfigError, match="use cpu, cuda or cuda:N"):
        Device.parse(text)


def test_devices() -> None:
    assert [str(Device.parse(text)) for text in ("cpu", "cuda", "cuda:3")] == ["cpu", "cuda:0", "cuda:3"]


def test_unknown_transport_lists_the_installed_ones() -> None:
    assert {"cma", "memory", "ucx"} <= set(installed_transports())
    with pytest.raises(TransportUnavailableError, match=r"'nosuch' is not installed; installed: cma, memory, ucx"):
        open_transport("nosuch")


def test_native_events_become_completions() -> None:
    failed, lost = completions_of(
        [("StaleRegionError", 3, 4, 0, 0, 0, "gone", 14), ("PeerLostError", 0, 4, 0, 0, 0, "gone", 3)]
    )
    assert isinstance(failed.reason, errors.StaleRegionError)  # type: ignore[union-attr]
    assert failed.reason.code == 14  # type: ignore[union-attr]
    assert type(lost).__name__ == "PeerLost"


def test_error_tree_in_the_docstring_is_the_real_one() -> None:
    assert errors.__doc__
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.KVRDMAError):
            assert f" {name} " in errors.__doc__ or f"{name}\n" in errors.__doc__, name
