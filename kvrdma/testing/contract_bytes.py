"""Contract: the right bytes arrive in the right places, and nowhere else."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvrdma.rows import merge_rows
from kvrdma.testing import target as at
from kvrdma.testing.contract_base import SEED, ContractBase
from kvrdma.testing.target import PAGE, Reader, done, scattered
from kvrdma.transport import Device, Peer, ReadId

SIZES = [0, 1, 2, 7, 8, 63, 64, 65, 255, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 65535, 65537, (1 << 20) + 3]


class BytesContract(ContractBase):
    """Exactness of single and scattered rows."""

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_one_row_of(self, nbytes: int) -> None:
        reader, _, peer, sources = self.link(nbytes + 256, [nbytes + 256])
        rows = reader.rows([(100, 0, 37, nbytes)])
        ended = done(reader.read(peer, rows))
        assert (ended.rows, ended.rows_posted, ended.nbytes) == (1, int(nbytes > 0), nbytes)
        reader.check(rows, sources)

    @pytest.mark.parametrize("shift", [1, 3, 8, 511])
    def test_unaligned_ends(self, shift: int) -> None:
        reader, _, peer, sources = self.link(4 * PAGE, [4 * PAGE])
        rows = reader.rows([(shift, 0, 0, PAGE), (2 * PAGE, 0, 2 * PAGE + shift, PAGE)])
        done(reader.read(peer, rows))
        reader.check(rows, sources)

    def test_whole_region(self) -> None:
        reader, _, peer, sources = self.link(3 * PAGE + 1, [3 * PAGE + 1])
        rows = reader.rows([(0, 0, 0, 3 * PAGE + 1)])
        done(reader.read(peer, rows))
        reader.check(rows, sources)

    def test_no_rows_at_all(self) -> None:
        reader, _, peer, sources = self.link(64, [64])
        rows = reader.rows([])
        ended = done(reader.read(peer, rows))
        assert (ended.rows, ended.rows_posted, ended.nbytes) == (0, 0, 0)
        reader.check(rows, sources)

    def test_only_empty_rows(self) -> None:
        reader, _, peer, sources = self.link(64, [64])
        rows = reader.rows([(0, 0, 0, 0), (64, 0, 64, 0)])
        ended = done(reader.read(peer, rows))
        assert (ended.rows, ended.rows_posted, ended.nbytes) == (2, 0, 0)
        reader.check(rows, sources)

    def test_across_2_and_4_gib(self) -> None:
        size = (4 << 30) + 8192
        places = [0, (2 << 30) - 2048, (4 << 30) - 2048]
        target = self.new_target()
        target.call(at.open_sparse_target, type(self).factory, size, places)
        transport = self.open()
        big = np.zeros(size, np.uint8)
        region = transport.register(big.ctypes.data, size, Device())
        reader = Reader(transport, big, region, self.timeout_s)
        peer = self.connect(reader, target)
        rows = reader.rows([(place + 1024, 0, place, 4096) for place in places])
        done(reader.read(peer, rows))
        for index, place in enumerate(places):
            np.testing.assert_array_equal(big[place + 1024 : place + 5120], at.pattern(index, 4096))
            assert not big[place : place + 1024].any()
            assert not big[place + 5120 : place + 7168].any()

    def test_100_000_rows_in_one_batch(self) -> None:
        count, block = 100_000, 64
        reader, _, peer, sources = self.link(count * block * 2, [count * block * 2])
        rows = reader.rows(scattered(count, block, 2 * count, seed=5))
        ended = done(reader.read(peer, rows))
        assert (ended.rows, ended.nbytes) == (count, count * block)
        assert ended.rows_posted == len(merge_rows(rows))
        reader.check(rows, sources)

    @pytest.mark.parametrize("block", [1, 24, 100, PAGE])
    def test_scattered_rows_touch_nothing_else(self, block: int) -> None:
        reader, _, peer, sources = self.link(600 * block, [600 * block])
        rows = reader.rows([(3 * a, 0, b, n) for a, _, b, n in scattered(200, block, 200, seed=block)])
        done(reader.read(peer, rows))
        reader.check(rows, sources)

    def test_rows_of_many_lengths(self) -> None:
        rng = np.random.default_rng(3)
        lengths = rng.integers(0, 9000, 100)
        starts = np.concatenate(([0], np.cumsum(lengths + 5)))
        order = rng.permutation(100)
        total = int(starts[-1]) + 16
        reader, _, peer, sources = self.link(total, [total])
        pieces = [(int(starts[i]), 0, int(starts[99 - i]), int(lengths[99 - i])) for i in order]
        local = np.concatenate(([0], np.cumsum([n for *_, n in pieces])))
        rows = reader.rows([(int(at_), 0, off, n) for at_, (_, _, off, n) in zip(local, pieces, strict=False)])
        done(reader.read(peer, rows))
        reader.check(rows, sources)

    def test_adjacent_rows_are_merged_in_any_order(self) -> None:
        reader, _, peer, sources = self.link(64 * PAGE, [64 * PAGE])
        order = np.random.default_rng(2).permutation(64)
        rows = reader.rows([(int(i) * PAGE, 0, int(i) * PAGE, PAGE) for i in order])
        ended = done(reader.read(peer, rows))
        assert (ended.rows, ended.rows_posted) == (64, 1)
        reader.check(rows, sources)

    def test_rows_adjacent_on_one_side_only_stay_apart(self) -> None:
        reader, _, peer, sources = self.link(32 * PAGE, [32 * PAGE])
        remote = [(2 * i * PAGE, 0, i * PAGE, PAGE) for i in range(8)]
        local = [((16 + i) * PAGE, 0, (17 + 2 * i) * PAGE, PAGE) for i in range(7)]
        rows = reader.rows(remote + local)
        assert done(reader.read(peer, rows)).rows_posted == 15
        reader.check(rows, sources)

    def test_rows_of_two_regions_stay_apart(self) -> None:
        reader, _, peer, sources = self.link(2 * PAGE, [PAGE, 2 * PAGE])
        rows = reader.rows([(0, 0, 0, PAGE), (PAGE, 1, PAGE, PAGE)])
        assert done(reader.read(peer, rows)).rows_posted == 2
        reader.check(rows, sources)

    def test_several_regions(self) -> None:
        sizes = [100, PAGE, 3 * PAGE + 5]
        reader, _, peer, sources = self.link(4 * PAGE, sizes)
        assert [region.nbytes for region in peer.regions] == sizes
        rows = reader.rows([(0, 2, 5, 3 * PAGE), (3 * PAGE, 0, 99, 1), (3 * PAGE + 8, 1, 0, 50)])
        done(reader.read(peer, rows))
        reader.check(rows, sources)

    def test_one_source_into_two_places(self) -> None:
        reader, _, peer, sources = self.link(4 * PAGE, [PAGE])
        rows = reader.rows([(0, 0, 0, PAGE), (2 * PAGE, 0, 0, PAGE)])
        done(reader.read(peer, rows))
        reader.check(rows, sources)

    def test_destination_in_overlapping_regions(self) -> None:
        reader, _, peer, sources = self.link(4 * PAGE, [4 * PAGE])
        reader.transport.register(reader.buffer.ctypes.data + PAGE, PAGE // 2, Device())
        rows = reader.rows([(PAGE, 0, 0, 2 * PAGE)])  # starts in the small region, fits only into the big one
        done(reader.read(peer, rows))
        reader.check(rows, sources)

    def test_rows_array_may_be_reused_at_once(self) -> None:
        reader, _, peer, sources = self.link(256 * PAGE, [256 * PAGE])
        rows = reader.rows(scattered(256, PAGE, 256, seed=4))
        given = rows.copy()
        read = reader.transport.read(peer, given)
        given[:] = 0
        done(reader.finish(read))
        reader.check(rows, sources)

    def test_rows_may_be_int64_or_strided(self) -> None:
        reader, _, peer, sources = self.link(8 * PAGE, [8 * PAGE])
        rows = reader.rows([(i * PAGE, 0, (7 - i) * PAGE, 100) for i in range(8)])
        done(reader.read(peer, np.repeat(rows, 2, axis=0)[::2].astype(np.int64)))
        reader.check(rows, sources)

    def test_every_read_sees_the_bytes_of_its_time(self) -> None:
        reader, target, peer, _ = self.link(16 * PAGE, [16 * PAGE])
        rows = reader.rows([(0, 0, 0, 16 * PAGE)])
        for seed in range(10, 14):
            target.call(at.refill, seed)
            done(reader.read(peer, rows))
            np.testing.assert_array_equal(reader.buffer, at.pattern(seed, 16 * PAGE))

    def test_several_peers_in_one_poll(self) -> None:
        targets = [self.target([PAGE], seed=50 + i) for i in range(3)]
        reader = self.reader(3 * PAGE)
        peers = [self.connect(reader, target) for target in targets]
        assert len({peer.id for peer in peers}) == 3
        reads = {
            reader.transport.read(peer, reader.rows([(i * PAGE, 0, 0, PAGE)])): peer for i, peer in enumerate(peers)
        }
        for read, ended in reader.drain(set(reads)).items():
            assert done(ended).peer == reads[read].id
        expected = np.concatenate([at.pattern(50 + i, PAGE) for i in range(3)])
        np.testing.assert_array_equal(reader.buffer, expected)

    def test_100_endpoints(self) -> None:
        target = self.target([100 * PAGE])
        reader = self.reader(100 * PAGE)
        peers = [self.connect(reader, target) for _ in range(100)]
        rows = reader.rows([(i * PAGE, 0, (99 - i) * PAGE, PAGE) for i in range(100)])
        reads = {reader.transport.read(peer, rows[i : i + 1]) for i, peer in enumerate(peers)}
        for ended in reader.drain(reads).values():
            done(ended)
        reader.check(rows, [at.pattern(SEED, 100 * PAGE)])
        for peer in peers[:50]:
            reader.transport.disconnect(peer)
        done(reader.read(peers[99], rows[:1]))

    def test_reads_from_8_threads(self) -> None:
        reader, _, peer, sources = self.link(8 * 64 * PAGE, [8 * 64 * PAGE])
        rows = reader.rows(scattered(8 * 64, PAGE, 8 * 64, seed=6))
        reads: list[ReadId] = []
        go = threading.Barrier(8)

        def post(peer: Peer, part: int) -> None:
            go.wait()
            mine = range(part * 64, part * 64 + 64, 4)
            reads.extend(reader.transport.read(peer, rows[i : i + 4]) for i in mine)

        threads = [threading.Thread(target=post, args=(peer, part)) for part in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(reads)) == 8 * 16
        for ended in reader.drain(set(reads)).values():
            done(ended)
        reader.check(rows, sources)
