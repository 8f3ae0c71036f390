"""What the two sides of an engine are put together from; tests put them together with other parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrdma.config import Config
from kvrdma.engine.background import Work
from kvrdma.engine.events import Event, Stats
from kvrdma.engine.links import Ask
from kvrdma.engine.loop import Loop
from kvrdma.engine.peers import Peers
from kvrdma.engine.tenant import Tenant
from kvrdma.lease import FenceTable
from kvrdma.plan import ReadPlan


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts a consumer works with."""

    config: Config
    loop: Loop
    fence: FenceTable
    peers: Peers
    tenant: Tenant
    stats: Stats
    ask: Ask
    finish: Callable[[ReadPlan], None]
    """Runs the reshapes of a plan."""
    background: Callable[[Work], None]
    """Runs work in another thread."""
    report: Callable[[Event], None]
