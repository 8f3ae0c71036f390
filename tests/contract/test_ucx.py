"""The ucx transport keeps the contract, in one process and between two."""

from __future__ import annotations

import functools

from kvrdma.testing import ProcessContract, TransportContract
from kvrdma.transport import open_transport

open_ucx = functools.partial(open_transport, "ucx")


class TestUcx(TransportContract):
    factory = open_ucx


class TestUcxTwoProcesses(ProcessContract):
    factory = open_ucx
