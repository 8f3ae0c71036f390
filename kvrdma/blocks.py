"""Small pure functions on the block id lists a scheduler hands out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Protocol, TypeAlias

BlockIdGroups: TypeAlias = Sequence[Sequence[int]]


class NewRequest(Protocol):
    """A request scheduled for the first time."""

    req_id: str
    block_ids: BlockIdGroups


class CachedRequests(Protocol):
    """Requests scheduled before, as parallel lists."""

    req_ids: Sequence[str]
    new_block_ids: Sequence[BlockIdGroups | None]
    resumed_req_ids: Collection[str]


class SchedulerOutput(Protocol):
    """The two lists of a scheduling step that matter here."""

    scheduled_new_reqs: Sequence[NewRequest]
    scheduled_cached_reqs: CachedRequests


def clip_ssm_state_blocks(blocks: Sequence[int], num_spec_blocks: int) -> list[int]:
    """Keep the one block that holds the running state.

    The last ``num_spec_blocks`` slots are scratch for speculative decoding; they may not be allocated yet, so
    at least one block always remains.

    Returns:
        A new list of one block id; empty for no blocks.
    """
    kept = max(1, len(blocks) - max(0, num_spec_blocks))
    return list(blocks[:kept])[-1:]


def yield_req_data(scheduler_output: SchedulerOutput) -> Iterator[tuple[str, BlockIdGroups | None, bool]]:
    """Walk a step's requests as ``(request id, block id groups, is_full_table)``.

    The groups are the request's whole table for new and resumed requests, and only the additions (or None)
    for the others.
    """
    cached = scheduler_output.scheduled_cached_reqs
    new = ((req.req_id, req.block_ids, True) for req in scheduler_output.scheduled_new_reqs)
    known = (
        (req_id, groups, req_id in cached.resumed_req_ids)
        for req_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True)
    )
    return chain(new, known)
