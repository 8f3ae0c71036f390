"""Reads memory of other processes and hosts with UCX: RDMA, CUDA IPC, and TCP by emulation."""

from __future__ import annotations

from kvrdma_ucx.transport import UcxTransport

__all__ = ["UcxTransport"]
