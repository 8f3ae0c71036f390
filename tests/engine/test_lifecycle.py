"""Random lives of engines keep every promise; and the check notices when one is broken."""

from __future__ import annotations

from collections import Counter

import pytest

from kvrdma.engine.consumer import Consumer
from kvrdma.engine.pull import Pull
from kvrdma.engine.reading import Reading
from kvrdma.lease import FenceTable, LeaseKey
from tests.engine.lifecycle import live

STEPS = 1500


@pytest.mark.parametrize("first", range(0, 12, 3))
def test_every_schedule_keeps_the_invariants(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 3):
        seen += live(seed, STEPS)
    assert seen["PullDone in 1"] > 50
    assert seen["PullDone in 2"] > 0
    for reason in ("PullAbortedError", "LeaseRevokedError", "PullTimeoutError", "IncompatibleError"):
        assert seen[reason] > 0, seen


def _finds(match: str) -> None:
    def live_on() -> None:
        for seed in range(20):
            live(seed, STEPS)

    with pytest.raises(AssertionError, match=match):
        live_on()


def test_a_fence_that_is_not_judged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(self: Reading, pull: Pull, index: int) -> bool:
        (pull.unfenced if pull.posted else pull.unopened).discard(index)
        return True

    monkeypatch.setattr(Reading, "judge", judge)
    _finds("wrong rows of request")


def test_a_word_that_is_not_revoked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def revoke(self: FenceTable, key: LeaseKey) -> None:
        del self, key

    monkeypatch.setattr(FenceTable, "revoke", revoke)
    _finds("wrong rows of request")


def test_a_pull_reported_while_it_may_be_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def advance(self: Consumer, pull: Pull) -> None:
        if not pull.over and pull.reason is not None and not pull.retryable:
            self._settle(pull)
        else:
            real(self, pull)

    real = Consumer._advance
    monkeypatch.setattr(Consumer, "_advance", advance)
    _finds("written after it was handed back|wrong rows")
