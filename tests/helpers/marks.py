"""Marks of whole files."""

from __future__ import annotations

import pytest

VLLM_SERVERS = [
    pytest.mark.needs("vllm"),
    pytest.mark.needs("cma"),
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.timeout(600),
]
"""Of tests that start `vllm serve`."""
