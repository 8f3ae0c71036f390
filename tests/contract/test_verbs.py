"""The verbs transport keeps the contract, where there is an RDMA device: in the guest of scripts/test-rdma."""

from __future__ import annotations

import functools

import pytest

from kvrdma.testing import ProcessContract, TransportContract
from kvrdma.transport import open_transport

pytestmark = pytest.mark.needs("verbs")
open_verbs = functools.partial(open_transport, "verbs")


class TestVerbs(TransportContract):
    factory = open_verbs


class TestVerbsTwoProcesses(ProcessContract):
    factory = open_verbs
    works_while_stopped = True
