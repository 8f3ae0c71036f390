"""The small helpers on scheduler output."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvrdma.blocks import clip_ssm_state_blocks, yield_req_data


@pytest.mark.parametrize(
    ("blocks", "spec", "expected"),
    [
        ([], 2, []),
        ([1, 2, 3, 4], 2, [2]),
        ([5], 3, [5]),
        ([1, 2], 0, [2]),
        ([1, 2, 3], 9, [1]),
        ([7, 8], 1, [7]),
    ],
)
def test_clip(blocks: list[int], spec: int, expected: list[int]) -> None:
    before = list(blocks)
    assert clip_ssm_state_blocks(blocks, spec) == expected
    assert blocks == before


def test_new_and_resumed_requests_carry_full_tables() -> None:
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", block_ids=([1, 2], [3]))],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["b", "c", "d"], new_block_ids=[([4], [5]), None, ([6], [7])], resumed_req_ids={"d"}
        ),
    )
    assert list(yield_req_data(output)) == [
        ("a", ([1, 2], [3]), True),
        ("b", ([4], [5]), False),
        ("c", None, False),
        ("d", ([6], [7]), True),
    ]


def test_lists_of_different_length_are_refused() -> None:
    cached = SimpleNamespace(req_ids=["b", "c"], new_block_ids=[None], resumed_req_ids=set())
    output = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)
    with pytest.raises(ValueError, match="shorter"):
        list(yield_req_data(output))
