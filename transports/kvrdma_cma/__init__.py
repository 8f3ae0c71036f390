"""Reads host memory of other processes of this host with ``process_vm_readv`` (Linux cross-memory attach)."""

from __future__ import annotations

from kvrdma_cma.transport import CmaTransport

__all__ = ["CmaTransport"]
