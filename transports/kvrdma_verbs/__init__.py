"""Reads memory of other hosts by RDMA READ with libibverbs itself: chained work requests, one doorbell per chain."""

from __future__ import annotations

from kvrdma_verbs.transport import VerbsTransport

__all__ = ["VerbsTransport"]
