"""The reference transport keeps the contract."""

from __future__ import annotations

import functools

from kvrdma.testing import TransportContract
from kvrdma.transport import open_transport


class TestMemory(TransportContract):
    factory = functools.partial(open_transport, "memory")
