"""Moves the KV cache of large language models between engines by one-sided reads."""

from __future__ import annotations

__version__ = "0.1.0"
