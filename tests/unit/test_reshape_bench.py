"""The reshape benchmark measures what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvrdma.bench.reshape import CASES, peak_nbytes, run_case

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.needs("torch")


def greedy(cache: torch.Tensor, indices: torch.Tensor, ratio: int) -> None:
    """Holds one tensor and one array of 1 MB together, after dropping a first tensor of 1 MB."""
    import torch

    torch.zeros(1 << 20, dtype=torch.uint8)
    held = (torch.zeros(1 << 20, dtype=torch.uint8), np.zeros(1 << 20, np.uint8))
    assert len(held) == 2


def test_extra_memory_counts_torch_and_numpy_and_forgets_what_was_freed() -> None:
    import torch

    measured = peak_nbytes(greedy, torch.empty(0), torch.empty(0), 1)
    assert 2 << 20 <= measured < (2 << 20) + (64 << 10)


@pytest.mark.needs("vllm")
@pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn
@pytest.mark.parametrize("case", [CASES[1], CASES[-1]], ids=lambda case: case.function)
def test_a_case_reports_both_sides(case: object) -> None:
    result = run_case(case, pages=64, repeat=2)  # type: ignore[arg-type]
    assert result["page_nbytes"] == 8 * 16 * result["shape"][2] * 2  # type: ignore[index]
    assert result["ratio"] == round(result["vllm_best_s"] / result["ours_best_s"], 2)  # type: ignore[operator]
    assert result["vllm_extra_pages"] >= 2 * 64  # type: ignore[operator]
    assert 1 <= result["ours_extra_pages"] <= 8  # type: ignore[operator]
