"""The cma transport keeps the contract, in one process and between two."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kvrdma.errors import RowsError
from kvrdma.rows import Grid, RowGrids
from kvrdma.testing import ProcessContract, TransportContract
from kvrdma.transport import open_transport

open_cma = functools.partial(open_transport, "cma")


class TestCma(TransportContract):
    factory = open_cma

    def test_head_and_tail_whose_rows_add_up_to_none(self) -> None:
        """2**63 of either, modulo 2**64: of tables that have grown since somebody counted them."""
        reader, _, peer, _ = self.link(64, [64])
        bases, pages, one = reader.rows([(0, 0, 0, 0)]).copy(), np.zeros((1, 4), np.uint64), np.zeros((1, 4), np.uint64)
        grids = RowGrids([Grid(bases, pages, pages, one)])
        for table in (bases, pages):
            table.resize((1 << 21, 4), refcheck=False)
        with pytest.raises(RowsError, match="too many rows for one read"):
            reader.transport.read(peer, grids, grids)  # type: ignore[arg-type]


class TestCmaTwoProcesses(ProcessContract):
    factory = open_cma
    works_while_stopped = True
