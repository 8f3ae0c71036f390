"""The contract suite, whole."""

from __future__ import annotations

from kvrdma.testing.contract_bounds import BoundsContract
from kvrdma.testing.contract_bytes import BytesContract
from kvrdma.testing.contract_grids import GridContract
from kvrdma.testing.contract_lifetime import LifetimeContract
from kvrdma.testing.contract_process import ProcessPartContract
from kvrdma.testing.contract_then import ThenContract


class TransportContract(BytesContract, GridContract, ThenContract, BoundsContract, LifetimeContract):
    """Every promise that can be tested with both ends in one process."""


class ProcessContract(ProcessPartContract, TransportContract):
    """Everything again between two processes, with those that freeze, die and restart."""
