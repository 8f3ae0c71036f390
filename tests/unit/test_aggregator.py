"""The aggregator: known rounds by hand. ``tests/connector`` compares it with vLLM's class."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvrdma.aggregator import ConnectorOutput, KVOutputAggregator, WorkerOutput
from kvrdma.errors import AggregationError


def said(**fields: object) -> WorkerOutput:
    return WorkerOutput(ConnectorOutput(**fields))  # type: ignore[arg-type]


def nothing() -> WorkerOutput:
    return WorkerOutput()


class Counter:
    def __init__(self, *values: int) -> None:
        self.values = list(values)

    def aggregate(self, other: Counter) -> Counter:
        return Counter(*self.values, *other.values)


class Events:
    def __init__(self, *events: str) -> None:
        self.events, self.workers = list(events), 1

    def get_all_events(self) -> list[str]:
        return self.events

    def add_events(self, events: list[str]) -> None:
        self.events += events

    def increment_workers(self, count: int) -> None:
        self.workers += count


def test_finished_when_every_worker_has_said_so_over_several_steps() -> None:
    both = KVOutputAggregator(2)
    first = both.aggregate([said(finished_sending={"a"}, finished_recving={"b"}), nothing()]).kv_connector_output
    assert (first.finished_sending, first.finished_recving) == (None, None)
    second = both.aggregate([nothing(), said(finished_sending={"a", "c"})]).kv_connector_output
    assert (second.finished_sending, second.finished_recving) == ({"a"}, None)
    third = both.aggregate([said(finished_sending={"c"}), said(finished_recving={"b"})]).kv_connector_output
    assert (third.finished_sending, third.finished_recving) == ({"c"}, {"b"})


def test_the_same_id_can_be_used_again() -> None:
    both = KVOutputAggregator(2)
    for _ in range(3):
        ended = both.aggregate([said(finished_recving={"a"}), said(finished_recving={"a"})])
        assert ended.kv_connector_output.finished_recving == {"a"}


def test_a_worker_that_reports_twice_counts_once() -> None:
    both = KVOutputAggregator(2)
    for _ in range(3):
        assert both.aggregate([said(finished_sending={"a"}), nothing()]).kv_connector_output.finished_sending is None
    ended = both.aggregate([nothing(), said(finished_sending={"a"})])
    assert ended.kv_connector_output.finished_sending == {"a"}


def test_expected_count_changes_for_requests_seen_afterwards() -> None:
    three = KVOutputAggregator(3)
    three.aggregate([said(finished_sending={"old"}), nothing(), nothing()])
    step = [said(expected_finished_count=1, finished_sending={"new"}), said(finished_sending={"old"}), nothing()]
    combined = three.aggregate(step).kv_connector_output
    assert combined.finished_sending == {"new"}
    assert combined.expected_finished_count == 1
    last = three.aggregate([nothing(), nothing(), said(finished_sending={"old"})])
    assert last.kv_connector_output.finished_sending == {"old"}


def test_failures_are_told_with_the_end_of_the_request_once() -> None:
    both = KVOutputAggregator(2)
    first = both.aggregate([said(finished_recving={"a"}, failed_recving={"a"}), nothing()]).kv_connector_output
    assert first.failed_recving == set()
    second = both.aggregate([nothing(), said(finished_recving={"a"})]).kv_connector_output
    assert (second.finished_recving, second.failed_recving) == ({"a"}, {"a"})
    again = both.aggregate([said(finished_recving={"a"}), said(finished_recving={"a"})]).kv_connector_output
    assert again.failed_recving == set()


def test_invalid_blocks_pass_at_once() -> None:
    both = KVOutputAggregator(2)
    combined = both.aggregate([said(invalid_block_ids={1, 2}), said(invalid_block_ids={2, 3})]).kv_connector_output
    assert combined.invalid_block_ids == {1, 2, 3}
    assert both.aggregate([nothing(), nothing()]).kv_connector_output.invalid_block_ids == set()


def test_stats_meta_and_events_are_folded() -> None:
    events = Events("x")
    step = [
        said(kv_connector_stats=Counter(1), kv_connector_worker_meta=Counter(7)),
        said(kv_cache_events=events),
        said(kv_connector_stats=Counter(2), kv_cache_events=Events("y", "z"), kv_connector_worker_meta=Counter(8)),
    ]
    combined = KVOutputAggregator(3).aggregate(step).kv_connector_output
    assert combined.kv_connector_stats.values == [1, 2]
    assert combined.kv_connector_worker_meta.values == [7, 8]
    assert combined.kv_cache_events is events
    assert (events.events, events.workers) == (["x", "y", "z"], 2)


def test_stats_of_different_types() -> None:
    with pytest.raises(AggregationError, match="Counter and dict"):
        KVOutputAggregator(2).aggregate([said(kv_connector_stats=Counter(1)), said(kv_connector_stats={"a": 1})])


def test_output_of_the_chosen_rank_is_returned() -> None:
    step = [said(finished_sending={"a"}), said(finished_sending={"a"})]
    assert KVOutputAggregator(2).aggregate(step, output_rank=1) is step[1]


def test_missing_outputs() -> None:
    both = KVOutputAggregator(2)
    assert both.aggregate([None, said(finished_sending={"a"})]) is None
    with pytest.raises(AggregationError, match=r"workers \[1\] of 2"):
        both.aggregate([nothing(), None])
    with pytest.raises(AssertionError):
        both.aggregate([nothing(), None])


def test_deferred_outputs_join_the_next_step_exactly_once() -> None:
    both = KVOutputAggregator(2)
    failed = [said(finished_recving={"a"}, failed_recving={"a"}, kv_cache_events=Events("lost")), None]
    both.ft_defer_kv_connector_outputs(failed)
    assert both.aggregate([None, nothing()]) is None  # they survive this
    combined = both.aggregate([nothing(), said(finished_recving={"a"})]).kv_connector_output
    assert (combined.finished_recving, combined.failed_recving) == ({"a"}, {"a"})
    assert combined.kv_cache_events is None
    assert both.aggregate([nothing(), nothing()]).kv_connector_output.finished_recving is None


def test_a_deferred_report_and_its_repetition_count_once() -> None:
    both = KVOutputAggregator(2)
    both.ft_defer_kv_connector_outputs([said(finished_sending={"a"}), nothing()])
    combined = both.aggregate([said(finished_sending={"a"}), nothing()]).kv_connector_output
    assert combined.finished_sending is None


@pytest.mark.parametrize(("count", "expected"), [(None, 4), (0, 4), (2, 2)])
def test_from_connector(count: int | None, expected: int) -> None:
    aggregator = KVOutputAggregator.from_connector(SimpleNamespace(get_finished_count=lambda: count), 4)
    combined = aggregator.aggregate([nothing()] * 4).kv_connector_output
    assert combined.expected_finished_count == expected


@pytest.mark.parametrize("count", [0, -1])
def test_at_least_one_worker(count: int) -> None:
    with pytest.raises(AggregationError, match=f"expected_finished_count={count}"):
        KVOutputAggregator(count)
