"""Finishes received pages: one in-place transpose on GPU (CuPy), CPU (torch) and in a slow reference (numpy)."""

from __future__ import annotations

from kvrdma.reshape.spec import Reshape

__all__ = ["Reshape"]
