"""Reads memory of other processes and hosts with UCX: RDMA and CUDA IPC one-sided, TCP served by the peer."""

from __future__ import annotations

from kvrdma_ucx.transport import UcxTransport

__all__ = ["UcxTransport"]
