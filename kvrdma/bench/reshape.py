"""Compares the CPU reshape with vLLM's function of the same name: time and extra memory, a JSON object each.

``python -m kvrdma.bench.reshape --pages 1024``. Without vLLM the fields about it are null.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import time
import tracemalloc
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrdma import reshape
from kvrdma.bench.command import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    Receive = Callable[[torch.Tensor, torch.Tensor, int], None]

RIVAL = "vllm.distributed.kv_transfer.kv_connector.utils"
BLOCK_SIZE = "kv_postprocess_blksize_on_receive"
LAYOUT = "kv_postprocess_blksize_and_layout_on_receive"


@dataclass(frozen=True, slots=True)
class ReshapeCase:
    """One function on bfloat16 pages ``[heads, tokens, content]`` made of ``ratio`` small blocks."""

    function: str
    heads: int
    tokens: int
    content: int
    ratio: int

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page."""
        return self.heads * self.tokens * self.content * 2


CASES = (
    ReshapeCase(BLOCK_SIZE, heads=4, tokens=16, content=64, ratio=4),
    ReshapeCase(BLOCK_SIZE, heads=8, tokens=16, content=128, ratio=4),
    ReshapeCase(BLOCK_SIZE, heads=8, tokens=16, content=256, ratio=4),
    ReshapeCase(BLOCK_SIZE, heads=2, tokens=128, content=128, ratio=4),
    ReshapeCase(BLOCK_SIZE, heads=8, tokens=64, content=256, ratio=4),
    ReshapeCase(LAYOUT, heads=8, tokens=16, content=256, ratio=1),
    ReshapeCase(LAYOUT, heads=8, tokens=16, content=256, ratio=4),
)


def run_case(case: ReshapeCase, pages: int, repeat: int) -> dict[str, object]:
    """Times ours and vLLM's in turns on the same scattered pages of one cache.

    Args:
        case: what to run.
        pages: pages to reshape, out of 1.5 times as many.
        repeat: timed rounds after one that warms up.

    Returns:
        Times in seconds, extra memory in bytes and pages, ``ratio`` = vLLM's best time over ours.
    """
    import torch

    pool = pages * 3 // 2
    cache = torch.zeros(pool, case.heads, case.tokens, case.content, dtype=torch.bfloat16)
    if case.function == LAYOUT:
        cache = torch.zeros(pool, case.tokens, case.heads, case.content, dtype=torch.bfloat16).transpose(1, 2)
    indices = torch.randperm(pool, generator=torch.Generator().manual_seed(0))[:pages]
    contenders = {"ours": getattr(reshape, case.function), "vllm": _rival(case.function)}
    result: dict[str, object] = {
        "bench": "reshape",
        "function": case.function,
        "pages": pages,
        "page_nbytes": case.page_nbytes,
        "shape": [case.heads, case.tokens, case.content],
        "block_size_ratio": case.ratio,
        "torch_threads": torch.get_num_threads(),
    }
    times = _in_turns(contenders, (cache, indices, case.ratio), repeat)
    for name, function in contenders.items():
        extra = peak_nbytes(function, cache, indices, case.ratio) if function else None
        result[f"{name}_best_s"] = min(times[name], default=None)
        result[f"{name}_median_s"] = statistics.median(times[name]) if times[name] else None
        result[f"{name}_extra_nbytes"] = extra
        result[f"{name}_extra_pages"] = None if extra is None else round(extra / case.page_nbytes, 2)
    if times["vllm"]:
        result["ratio"] = round(min(times["vllm"]) / min(times["ours"]), 2)
        result["ratio_median"] = round(statistics.median(times["vllm"]) / statistics.median(times["ours"]), 2)
    return result


def _in_turns(
    contenders: Mapping[str, Receive | None], arguments: tuple[torch.Tensor, torch.Tensor, int], repeat: int
) -> dict[str, list[float]]:
    """Times each contender ``repeat`` times, one after another in every round, after a round that warms up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for timed in range(repeat + 1):
        for name, function in contenders.items():
            took = _seconds(function, *arguments) if function else None
            if took is not None and timed:
                times[name].append(took)
    return times


def peak_nbytes(function: Receive, cache: torch.Tensor, indices: torch.Tensor, ratio: int) -> int:
    """Measures the most memory a call holds at once beyond what was held before it.

    Adds Python's and NumPy's (tracemalloc) to torch's on the CPU (its profiler's memory events).
    """
    import torch

    tracemalloc.start()
    try:
        function(cache, indices, ratio)
        traced = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function(cache, indices, ratio)
    events = profile.profiler.kineto_results.events() if profile.profiler else []
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return traced + peak


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one JSON object for each case."""
    parser = argparse.ArgumentParser(prog="bench-reshape", description=__doc__)
    parser.add_argument("--pages", type=count, default=1024, help="pages to reshape in each call")
    parser.add_argument("--repeat", type=count, default=9, help="timed rounds")
    options = parser.parse_args(arguments)
    for case in CASES:
        print(json.dumps(run_case(case, options.pages, options.repeat)), flush=True)


def _rival(name: str) -> Receive | None:
    if importlib.util.find_spec("vllm") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports warn
        function: Receive = getattr(importlib.import_module(RIVAL), name)
    return function


def _seconds(function: Receive, cache: torch.Tensor, indices: torch.Tensor, ratio: int) -> float:
    start = time.perf_counter()
    function(cache, indices, ratio)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
