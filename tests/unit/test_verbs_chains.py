"""The builder of RDMA work requests, for pretended NICs: every byte once, within every limit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrdma.rows import Rows, as_rows
from kvrdma_verbs._chains import plan

LIMITS: dict[str, Any] = {
    "max_sge": 4,
    "max_request": 1 << 20,
    "max_requests": 32,
    "max_chain": 4 << 20,
    "depth": 128,
    "speeds": [1],
}


def _rows(lengths: list[int], gaps: list[int], regions: list[int]) -> Rows:
    """Sorted rows: each lies behind the last one of its region, after a gap, which may be 0."""
    ends: Counter[int] = Counter()
    rows = []
    for number, (length, gap, region) in enumerate(zip(lengths, gaps, sorted(regions), strict=True)):
        start = ends[region] + gap
        rows.append(((1 << 40) + (number << 24), region, start, length))
        ends[region] = start + length
    return as_rows(rows)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_byte_is_read_once_within_the_limits(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 60))
    each: dict[str, Any] = {"min_size": count, "max_size": count}
    rows = _rows(
        data.draw(st.lists(st.integers(1, 9000), **each)),
        data.draw(st.lists(st.sampled_from([0, 0, 0, 8, 512]), **each)),
        data.draw(st.lists(st.integers(0, 2), **each)),
    )
    limits: dict[str, Any] = {
        "max_sge": data.draw(st.integers(1, 8)),
        "max_request": data.draw(st.sampled_from([64, 1000, 4096, 1 << 20])),
        "max_requests": data.draw(st.integers(1, 32)),
        "max_chain": data.draw(st.sampled_from([1, 5000, 1 << 22])),
        "depth": data.draw(st.integers(1, 64)),
    }
    speeds = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    seen: Counter[tuple[int, int, int]] = Counter()
    for queue, requests in plan(rows, **limits, speeds=speeds):
        assert 0 <= queue < len(speeds)
        assert 1 <= len(requests) <= min(limits["max_requests"], limits["depth"])
        for region, offset, pieces in requests:
            assert 1 <= len(pieces) <= limits["max_sge"]
            assert 0 < sum(nbytes for _, _, nbytes in pieces) <= limits["max_request"]
            for addr, _, nbytes in pieces:
                for byte in range(nbytes):
                    seen[addr + byte, region, offset + byte] += 1
                offset += nbytes  # noqa: PLW2901 - pieces of one request follow each other at the peer
    wanted = {(a + i, r, o + i) for a, r, o, n in rows.tolist() for i in range(n)}
    assert set(seen) == wanted
    assert set(seen.values()) == {1}


def test_one_remote_run_becomes_one_request_with_its_local_pieces() -> None:
    rows = as_rows([(1000, 0, 0, 64), (5000, 0, 64, 64), (3000, 0, 128, 64), (9000, 0, 256, 64)])
    ((_, requests),) = plan(rows, **LIMITS)
    assert requests == [
        (0, 0, [(1000, 0, 64), (5000, 0, 64), (3000, 0, 64)]),
        (0, 256, [(9000, 0, 64)]),
    ]


def test_regions_on_either_side_are_kept_apart() -> None:
    rows = as_rows([(1000, 0, 0, 64), (2000, 1, 64, 64), (3000, 1 | 7 << 32, 128, 64)])
    ((_, requests),) = plan(rows, **LIMITS)
    assert requests == [(0, 0, [(1000, 0, 64)]), (1, 64, [(2000, 0, 64), (3000, 7, 64)])]


def test_long_rows_are_shared_between_queues() -> None:
    rows = as_rows([(0, 0, 0, 64 << 20)])
    chains = plan(rows, **(LIMITS | {"speeds": [1, 1, 1, 1]}))
    assert {queue for queue, _ in chains} == {0, 1, 2, 3}
    assert all(nbytes <= 1 << 20 for _, requests in chains for _, _, pieces in requests for _, _, nbytes in pieces)


def test_slower_nics_get_less() -> None:
    rows = as_rows([(i << 24, 0, 2 * i << 20, 1 << 20) for i in range(2000)])
    share = Counter(queue for queue, _ in plan(rows, **(LIMITS | {"depth": 16, "speeds": [4, 4, 1]})))
    assert share[0] == pytest.approx(share[1], rel=0.1)
    assert share[2] < 0.5 * share[0]


@pytest.mark.parametrize("speeds", [[1], [1, 1], [1] * 8])
def test_100_000_rows(speeds: list[int]) -> None:
    rng = np.random.default_rng(1)
    offsets = np.sort(rng.permutation(200_000)[:100_000])
    rows = as_rows(
        np.stack([offsets * 0 + 8 * np.arange(100_000), offsets * 0, offsets * 4096, offsets * 0 + 8], axis=1)
    )
    chains = plan(rows, **(LIMITS | {"speeds": speeds}))
    assert sum(len(pieces) for _, requests in chains for _, _, pieces in requests) == 100_000
