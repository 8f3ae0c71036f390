"""For everybody who writes or uses a transport: the contract suite and what tests of failures need.

Subclass ``TransportContract`` in a pytest module, set ``factory``, and every promise of ``kvrdma.transport``
is tested with both ends in one process; ``ProcessContract`` tests it between two, with peers that freeze and
die. These two need pytest; the rest does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvrdma.testing.clock import FakeClock
from kvrdma.testing.fault import Fault, FaultTransport
from kvrdma.testing.peer import PeerProcess, PeerProcessError, freeze

if TYPE_CHECKING:
    from kvrdma.testing.contract import ProcessContract, TransportContract

__all__ = [
    "FakeClock",
    "Fault",
    "FaultTransport",
    "PeerProcess",
    "PeerProcessError",
    "ProcessContract",
    "TransportContract",
    "freeze",
]


def __getattr__(name: str) -> object:
    """Import the contract suite when it is first asked for."""
    if name not in {"ProcessContract", "TransportContract"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module("kvrdma.testing.contract"), name)
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise ImportError(f"{name} is a pytest suite: pip install pytest, or 'kvrdma[dev]'") from error
