"""The ucx transport keeps the contract: served over tcp, one-sided, in one process and between two."""

from __future__ import annotations

import functools
import os

import pytest

from kvrdma.testing import ProcessContract, TransportContract
from kvrdma.transport import open_transport
from kvrdma_ucx import UcxTransport

open_ucx = functools.partial(open_transport, "ucx")


class TestUcx(TransportContract):
    factory = open_ucx


class OneSidedUcx(UcxTransport):
    """Reads host memory of this host by UCX's cma: the one-sided path of RDMA, without its devices."""

    _peer_errors = False


@pytest.mark.skipif("debian" in os.environ.get("KVRDMA_UCX_LIB", ""), reason="UCX 1.13 has no GET by cma")
class TestUcxOneSided(TransportContract):
    factory = OneSidedUcx

    def test_20_000_batches_leave_nothing_behind(self) -> None:
        pytest.skip("without error reports UCX keeps 100 KB of shared memory of every endpoint that was closed")


class TestUcxTwoProcesses(ProcessContract):
    factory = open_ucx
