"""Contract: rows that are not written out are read as if they were."""

from __future__ import annotations

import numpy as np
import pytest

from kvrdma.errors import RowsError
from kvrdma.rows import Grid, RowGrids, Rows, RowTable, pack_rows
from kvrdma.testing.contract_base import ContractBase
from kvrdma.testing.target import PAGE, POISON, Reader, done

TOP = (1 << 64) - 1


def relative(pieces: list[tuple[int, int, int, int]]) -> memoryview:
    """Make cells: rows relative to a base."""
    return pack_rows([number for piece in pieces for number in piece])


def layers(reader: Reader, count: int, nbytes: int) -> Rows:
    """Make bases: equal layers, the last one first on the other side."""
    return reader.rows([(i * nbytes, 0, (count - 1 - i) * nbytes, 0) for i in range(count)])


class GridContract(ContractBase):
    """Sums of bases and cells."""

    @pytest.mark.parametrize("packed", [False, True])
    def test_every_base_meets_every_cell(self, packed: bool) -> None:  # noqa: FBT001
        layer = 8 * PAGE
        reader, _, peer, sources = self.link(6 * layer, [6 * layer])
        pieces = [(5 * PAGE, 0, 2 * PAGE, PAGE), (PAGE, 0, 7 * PAGE + 3, 100), (3 * PAGE, 0, 0, 0)]
        cells: RowTable = relative(pieces) if packed else np.array(pieces, np.uint64)
        grids = RowGrids([Grid(layers(reader, 6, layer), cells)])
        ended = done(reader.finish(reader.transport.read(peer, grids)))
        assert (ended.rows, ended.rows_posted, ended.nbytes) == (18, 12, 6 * (PAGE + 100))
        reader.check(grids.expand(), sources)

    def test_several_grids(self) -> None:
        reader, _, peer, sources = self.link(20 * PAGE, [4 * PAGE, 8 * PAGE, 2 * PAGE])
        pieces = relative([(PAGE, 0, 0, PAGE), (0, 0, 2 * PAGE, PAGE)])
        one = Grid(reader.rows([(0, 1, 0, 0), (4 * PAGE, 0, 0, 0)]), pieces)
        two = Grid(reader.rows([(10 * PAGE, 0, 0, PAGE)]), relative([(0, 2, 0, 0), (2 * PAGE, 1, 5 * PAGE, 17)]))
        empty = reader.rows([])
        grids = RowGrids([one, two, Grid(one.bases, empty), Grid(empty, pieces), Grid(one.bases, pieces, empty)])
        ended = done(reader.finish(reader.transport.read(peer, grids)))
        assert (ended.rows, ended.nbytes) == (6, 6 * PAGE + 17)
        reader.check(grids.expand(), sources)

    def test_many(self) -> None:
        block, blocks, count = 512, 40, 50
        layer = block * blocks
        reader, _, peer, sources = self.link(count * layer, [count * layer])
        mine, theirs = (np.random.default_rng(seed).permutation(blocks)[:30].tolist() for seed in (1, 2))
        cells = relative([(a * block, 0, b * block, block) for a, b in zip(mine, theirs, strict=True)])
        grids = RowGrids([Grid(layers(reader, count, layer), cells)])
        assert done(reader.finish(reader.transport.read(peer, grids))).rows == 30 * count
        reader.check(grids.expand(), sources)

    @pytest.mark.parametrize("packed", [False, True])
    def test_pages_by_their_numbers(self, packed: bool) -> None:  # noqa: FBT001
        layer, page = 10 * PAGE, PAGE
        reader, _, peer, sources = self.link(3 * layer, [3 * layer])
        numbers = [(4, 0, 9, 1), (7, 0, 2, 2), (1, 0, 0, 1)]
        pages: RowTable = relative(numbers) if packed else np.array(numbers, np.uint64)
        whole = Grid(layers(reader, 3, layer), relative([(0, 0, 0, 0)]), pages, pack_rows((page, 0, page, page)))
        grids = RowGrids([whole])
        ended = done(reader.finish(reader.transport.read(peer, grids)))
        assert (ended.rows, ended.nbytes) == (9, 3 * 4 * page)
        reader.check(grids.expand(), sources)
        reader.buffer[:] = POISON
        halves = relative([(0, 0, page // 2, page // 2), (page // 2, 0, 0, 10)])
        grids = RowGrids([whole._replace(cells=halves, scale=pack_rows((page, 0, page, 0)))])
        ended = done(reader.finish(reader.transport.read(peer, grids)))
        assert (ended.rows, ended.nbytes) == (18, 9 * (page // 2 + 10))
        reader.check(grids.expand(), sources)

    def test_a_scale_of_two_rows(self) -> None:
        reader, _, peer, sources = self.link(PAGE, [PAGE])
        rows, two = reader.rows([(0, 0, 0, 8)]), np.zeros((2, 4), np.uint64)
        with pytest.raises(RowsError, match="scale of a grid is one row, not 2"):
            reader.transport.read(peer, RowGrids([Grid(rows, rows, rows, two)]))
        reader.check(reader.rows([]), sources)

    def test_sums_are_modulo_2_to_the_64(self) -> None:
        reader, _, peer, sources = self.link(4 * PAGE, [4 * PAGE])
        grids = RowGrids([Grid(reader.rows([(PAGE, 1, 3 * PAGE, 100)]), relative([(-PAGE, -1, -2 * PAGE, -40)]))])
        done(reader.finish(reader.transport.read(peer, grids)))
        reader.check(reader.rows([(0, 0, PAGE, 60)]), sources)

    def test_none(self) -> None:
        reader, _, peer, sources = self.link(PAGE, [PAGE])
        for grids in (RowGrids([]), RowGrids([Grid(reader.rows([]), reader.rows([]))])):
            ended = done(reader.finish(reader.transport.read(peer, grids)))
            assert (ended.rows, ended.rows_posted, ended.nbytes) == (0, 0, 0)
        reader.check(reader.rows([]), sources)

    def test_what_comes_second(self) -> None:
        reader, _, peer, sources = self.link(4 * PAGE, [4 * PAGE])
        grids = RowGrids([Grid(layers(reader, 2, PAGE), relative([(0, 0, 0, PAGE)]))])
        address = reader.buffer.ctypes.data + 3 * PAGE
        done(reader.finish(reader.transport.read(peer, grids, pack_rows((address, 0, 8, 8)))))
        reader.check(np.concatenate((grids.expand(), reader.rows([(3 * PAGE, 0, 8, 8)]))), sources)

    @pytest.mark.parametrize(
        ("base", "cell", "row", "message"),
        [
            ((0, 0, 2 * PAGE, 0), (0, 0, 0, 1), 7, "remote region of 8192 bytes"),
            ((0, 1, 0, 0), (0, 0, 0, 8), 6, "no .*region"),
            ((3 * PAGE, 0, 0, 0), (PAGE - 7, 0, 0, 8), 7, "local"),
            ((0, 0, 0, TOP), (0, 0, 8, 0), 6, "remote region of 8192 bytes"),
            ((0, 0, 8, 0), (0, 0, TOP - 1, 8), 1, "remote region of 8192 bytes"),
        ],
    )
    def test_a_sum_out_of_bounds(
        self, base: tuple[int, int, int, int], cell: tuple[int, int, int, int], row: int, message: str
    ) -> None:
        reader, _, peer, sources = self.link(4 * PAGE, [2 * PAGE])
        good = reader.rows([(0, 0, 0, 0)] * 3)
        bad = np.array([[(reader.buffer.ctypes.data + base[0]) & TOP, *base[1:]]], np.uint64)
        grids = RowGrids([Grid(np.concatenate((good, bad, good)), np.array([(0, 0, 0, 0), cell], np.uint64))])
        with pytest.raises(RowsError, match=f"(?s)row {row} .*{message}"):
            reader.transport.read(peer, grids)
        done(reader.read(peer, reader.rows([])))
        reader.check(reader.rows([]), sources)

    def test_more_rows_than_can_be_counted(self) -> None:
        reader, _, peer, sources = self.link(PAGE, [PAGE])
        many = np.zeros((1 << 16, 4), np.uint64)
        with pytest.raises(RowsError, match=f"{1 << 32} rows"):
            reader.transport.read(peer, RowGrids([Grid(many, many)]))
        reader.check(reader.rows([]), sources)

    def test_tables_that_have_grown_since(self) -> None:
        reader, _, peer, sources = self.link(PAGE, [PAGE])
        one = np.zeros((1, 4), np.uint64)
        bases, cells = reader.rows([(0, 0, 0, 0)]).copy(), one.copy()
        grids = RowGrids([Grid(bases, cells, cells, one)])
        bases.resize((1 << 21, 4), refcheck=False)
        cells.resize((1 << 21, 4), refcheck=False)
        with pytest.raises(RowsError, match=r"rows: one batch|too many rows"):
            reader.transport.read(peer, grids)
        reader.check(reader.rows([]), sources)

    def test_no_rows_at_all(self) -> None:
        reader, _, peer, _ = self.link(PAGE, [PAGE])
        with pytest.raises(RowsError, match="rows are a NoneType"):
            reader.transport.read(peer, None)  # type: ignore[arg-type]
        with pytest.raises(RowsError, match="holds a NoneType"):
            reader.transport.read(peer, RowGrids([None]))  # type: ignore[list-item]
        with pytest.raises(RowsError, match="is a NoneType"):
            RowGrids(None)  # type: ignore[arg-type]

    def test_memory_that_was_released(self) -> None:
        reader, _, peer, _ = self.link(PAGE, [PAGE])
        rows = pack_rows((0, 0, 0, 8))
        rows.release()
        with pytest.raises(RowsError, match=r"cannot be read|rows have shape"):
            reader.transport.read(peer, rows)

    def test_arrays_may_be_reused_at_once(self) -> None:
        reader, _, peer, sources = self.link(64 * PAGE, [64 * PAGE])
        bases, cells = layers(reader, 4, 16 * PAGE), np.array([(PAGE * i, 0, 0, 99) for i in range(16)], np.uint64)
        grids = RowGrids([Grid(bases, cells)])
        rows = grids.expand()
        read = reader.transport.read(peer, grids)
        bases[:], cells[:] = POISON, POISON
        done(reader.finish(read))
        reader.check(rows, sources)
