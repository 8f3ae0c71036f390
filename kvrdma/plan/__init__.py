"""Read plans: which bytes of which remote rank land where, and the in-place reshape that finishes them."""

from __future__ import annotations

from kvrdma.plan.landing import ReadCost
from kvrdma.plan.planner import PageReshape, Planner, ReadPlan, SourceReads, plan_reads
from kvrdma.plan.request import BlockSpan, TokenRange

__all__ = [
    "BlockSpan",
    "PageReshape",
    "Planner",
    "ReadCost",
    "ReadPlan",
    "SourceReads",
    "TokenRange",
    "plan_reads",
]
