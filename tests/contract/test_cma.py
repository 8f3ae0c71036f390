"""The cma transport keeps the contract, in one process and between two."""

from __future__ import annotations

import functools

from kvrdma.testing import ProcessContract, TransportContract
from kvrdma.transport import open_transport

open_cma = functools.partial(open_transport, "cma")


class TestCma(TransportContract):
    factory = open_cma


class TestCmaTwoProcesses(ProcessContract):
    factory = open_cma
    works_while_stopped = True
