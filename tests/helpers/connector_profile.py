"""Counts the time that vLLM spends in the connector."""

# ruff: noqa: ANN401 - vLLM's objects are not type-checked with us

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any


def profile(scheduler: Any, totals: dict[str, int]) -> None:
    """Time every call that vLLM makes to the connector from now on; one process holds both sides."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    totals |= {"scheduler_ns": 0, "worker_ns": 0}
    for side, connector in (("scheduler_ns", scheduler), ("worker_ns", get_kv_transfer_group())):
        depth = [0]
        for name in dir(type(connector)):
            if not name.startswith("_") and inspect.isfunction(getattr(type(connector), name)):
                setattr(connector, name, _timed(totals, (side, name), getattr(connector, name), depth))


def _timed(totals: dict[str, int], keys: tuple[str, ...], method: Any, depth: list[int]) -> Callable[..., Any]:
    """Count the time in ``method``, unless another counted one has called it."""

    def call(*arguments: Any, **named: Any) -> Any:
        depth[0] += 1
        begin = time.perf_counter_ns()
        try:
            return method(*arguments, **named)
        finally:
            depth[0] -= 1
            if not depth[0]:
                spent = time.perf_counter_ns() - begin
                for key in keys:
                    totals[key] = totals.get(key, 0) + spent

    return call
