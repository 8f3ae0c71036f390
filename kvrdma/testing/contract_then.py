"""Contract: the rows of ``then`` are read when every byte of the others has arrived, as part of the same read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvrdma.errors import RowsError
from kvrdma.testing import target as at
from kvrdma.testing.contract_base import SEED, ContractBase
from kvrdma.testing.target import PAGE, POISON, Reader, done, pattern, register, scattered
from kvrdma.transport import Peer, ReadDone, ReadFailed

_ROUNDS = 10


class ThenContract(ContractBase):
    """What comes second, and that it comes second."""

    def _mirror(self, reader: Reader, source: at.Bytes) -> Peer:
        """Connect to a transport of this process that offers ``source`` and, second, the reader's own destination."""
        other = self.open()
        keys = [register(other, memory).key for memory in (source, reader.buffer)]
        return reader.transport.connect(other.address(), keys)

    @pytest.mark.parametrize(
        ("count", "block"), [(1, 24), (3, 100), (300, 64), (64, PAGE), (3000, 512), (2, 5 << 20), (1, 9 << 20)]
    )
    def test_it_sees_what_the_rows_have_brought(self, count: int, block: int) -> None:
        """It reads the destination of the other rows: before they have arrived, there is poison."""
        nbytes, seen = count * block, min(8, count)
        reader, source = self.reader(nbytes + seen * 16), pattern(SEED, nbytes)
        peer = self._mirror(reader, source)
        pieces = scattered(count, block, count, seed=count)
        rows = reader.rows(pieces)
        step = count // seen
        ends = [pieces[step * i][0] + block - 16 for i in range(seen)]
        then = reader.rows([(nbytes + 16 * i, 1, end, 16) for i, end in enumerate(ends)])
        for _ in range(_ROUNDS):
            reader.buffer[:] = POISON
            ended = done(reader.finish(reader.transport.read(peer, rows, then)))
            assert (ended.rows, ended.nbytes) == (count, nbytes)
            for i, end in enumerate(ends):
                np.testing.assert_array_equal(reader.buffer[nbytes + 16 * i :][:16], reader.buffer[end:][:16])
            assert not (reader.buffer == POISON).any()

    def test_many_reads_at_once_each_with_its_own(self) -> None:
        count, block = 40, 8 * PAGE
        reader, source = self.reader(count * (block + 16)), pattern(SEED, count * block)
        peer = self._mirror(reader, source)
        reads = {
            reader.transport.read(
                peer,
                reader.rows([(i * block, 0, (count - 1 - i) * block, block)]),
                reader.rows([(count * block + 16 * i, 1, i * block + block - 16, 16)]),
            )
            for i in range(count)
        }
        for ended in reader.drain(reads).values():
            done(ended)
        for i in range(count):
            right = source[(count - i) * block - 16 :][:16]
            np.testing.assert_array_equal(reader.buffer[count * block + 16 * i :][:16], right)

    @pytest.mark.parametrize("head", [[], [(0, 0, 0, 0)], [(0, 0, 8, 64), (64, 0, 72, 64)]], ids=["no", "empty", "two"])
    @pytest.mark.parametrize("tail", [[], [(PAGE, 1, 5, 0)], [(PAGE, 1, 5, 11), (PAGE + 20, 0, 1, 9)]])
    def test_only_the_rows_are_counted(
        self, head: list[tuple[int, int, int, int]], tail: list[tuple[int, int, int, int]]
    ) -> None:
        reader, _, peer, sources = self.link(2 * PAGE, [PAGE, PAGE])
        rows, then = reader.rows(head), reader.rows(tail)
        ended = done(reader.finish(reader.transport.read(peer, rows, then)))
        nbytes = sum(length for *_, length in head)
        assert (ended.rows, ended.rows_posted, ended.nbytes) == (len(head), int(nbytes > 0), nbytes)
        reader.check(np.concatenate((rows, then)), sources)

    def test_both_arrays_may_be_reused_at_once(self) -> None:
        reader, _, peer, sources = self.link(64 * PAGE, [64 * PAGE])
        rows = reader.rows([(2 * i * PAGE, 0, i * PAGE, PAGE) for i in range(31)])
        then = reader.rows([(63 * PAGE, 0, 63 * PAGE, 100)])
        given, last = rows.copy(), then.copy()
        read = reader.transport.read(peer, given, last)
        given[:] = 0
        last[:] = 0
        done(reader.finish(read))
        reader.check(np.concatenate((rows, then)), sources)

    def test_it_may_be_int64_or_a_list(self) -> None:
        reader, _, peer, sources = self.link(PAGE, [PAGE])
        rows, then = reader.rows([(0, 0, 0, 8)]), reader.rows([(100, 0, 50, 8)])
        kinds: list[Any] = [then.astype(np.int64), then.tolist()]
        for given in kinds:
            reader.buffer[:] = POISON
            done(reader.finish(reader.transport.read(peer, rows, given)))
            reader.check(np.concatenate((rows, then)), sources)

    @pytest.mark.parametrize(
        ("piece", "message"),
        [((PAGE - 7, 0, 0, 8), "local"), ((0, 0, PAGE, 1), "remote region"), ((0, 1, 0, 8), "region")],
    )
    def test_a_row_out_of_bounds_counts_on_from_the_rows(self, piece: tuple[int, int, int, int], message: str) -> None:
        reader, _, peer, sources = self.link(PAGE, [PAGE])
        good = reader.rows([(0, 0, 0, 16)] * 5)
        with pytest.raises(RowsError, match=f"(?s)row 7 .*{message}"):
            reader.transport.read(peer, good, np.concatenate((good[:2], reader.rows([piece]))))
        done(reader.read(peer, reader.rows([])))
        reader.check(reader.rows([]), sources)

    def test_a_region_that_is_gone_fails_the_read(self) -> None:
        reader, target, peer, _ = self.link(2 * PAGE, [PAGE, PAGE])
        target.call(at.deregister, 1)
        read = reader.transport.read(peer, reader.rows([(0, 0, 0, PAGE)]), reader.rows([(PAGE, 1, 0, 8)]))
        assert isinstance(reader.finish(read), ReadFailed if self.stale_keys_noticed else ReadDone | ReadFailed)
