"""For everybody who writes or uses a transport: the contract suite and what tests of failures need.

Subclass ``TransportContract`` in a pytest module, set ``factory``, and every promise of ``kvrdma.transport``
is tested with both ends in one process; ``ProcessContract`` tests it between two, with peers that freeze and
die.
"""

from __future__ import annotations

from kvrdma.testing.clock import FakeClock
from kvrdma.testing.contract import ProcessContract, TransportContract
from kvrdma.testing.fault import Fault, FaultTransport
from kvrdma.testing.peer import PeerProcess, PeerProcessError

__all__ = [
    "FakeClock",
    "Fault",
    "FaultTransport",
    "PeerProcess",
    "PeerProcessError",
    "ProcessContract",
    "TransportContract",
]
