"""Where this worker stands among the ranks of its engine, asked from vLLM's process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvrdma.topology import RankId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig


def this_rank() -> RankId:
    """Name this worker's rank."""
    return RankId(get_pp_group().rank_in_group, get_tp_group().rank_in_group)


def pipeline_stages(vllm_config: VllmConfig, layer_names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Tell each other which layers each pipeline stage has; every rank calls this at the same time.

    Returns:
        Layer names per stage; empty for a single stage.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return ()
    from torch.distributed import all_gather_object

    gathered: list[tuple[str, ...]] = [()] * stages
    all_gather_object(gathered, tuple(layer_names), group=get_pp_group().cpu_group)
    return tuple(gathered)
