"""Pulls that succeed: every split, block size, prefix and group; exactly the right rows change."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest

from kvrdma.config import Config
from kvrdma.engine import End
from kvrdma.plan import BlockSpan, TokenRange
from kvrdma.reference import PullReference
from tests.helpers.tagged import SMALL, Model, Side, busy, done, ended

MODEL = Model()


@pytest.mark.parametrize("transport", ["memory", "cma"])
def test_exactly_the_rows_of_the_request_arrive(transport: str) -> None:
    with Side(MODEL, transport=transport) as producer, Side(MODEL, transport=transport) as consumer:
        reference = producer.publish(7, [3, 1, 4], 10)
        rank = consumer.ranks[0]
        event = done(rank.pull("mine", reference, [5, 9, 2]))
        assert rank.cache.wrong(7, [5, 9, 2], range(10)) == []
        # 2 layers of 10 tokens, 4 heads, 16 int32
        assert event.nbytes == 2 * 10 * 4 * 64
        assert event.request_id == "mine"
        assert event.attempts == 1
        assert event.via[0].startswith(transport)
        end = ended(producer.ranks[0].wait_for()[0])
        assert (end.request_id, end.how) == (7, End.DONE)
        assert busy(rank.engine) == {}
        assert producer.ranks[0].engine.stats()["leases"] == 0


@pytest.mark.parametrize(("start", "end"), [(0, 12), (4, 12), (5, 11), (0, 1), (11, 12), (3, 4), (6, 7)], ids=str)
def test_a_cached_prefix_and_partial_blocks(start: int, end: int) -> None:
    with Side(MODEL) as producer, Side(MODEL) as consumer:
        reference = producer.publish(1, [8, 6, 7], 12)
        rank = consumer.ranks[0]
        assert done(rank.pull(1, reference, [0, 1, 2], tokens=TokenRange(start, end))).nbytes == 512 * (end - start)
        assert rank.cache.wrong(1, [0, 1, 2], range(start, end)) == []


def test_blocks_behind_a_dropped_prefix() -> None:
    with Side(MODEL) as producer, Side(MODEL) as consumer:
        reference = producer.publish(1, [8, 6, 7], 12)
        rank = consumer.ranks[0]
        done(rank.pull(1, reference, [BlockSpan([1, 2], first=1)], tokens=TokenRange(4, 12)))
        assert rank.cache.wrong(1, [0, 1, 2], range(4, 12)) == []


def test_a_producer_s_sliding_window() -> None:
    with Side(MODEL) as producer, Side(MODEL) as consumer:
        sender = producer.ranks[0]
        sender.cache.write(1, [6, 7], range(8, 16), first=2)
        reference = sender.engine.publish(1, [6, 7], 16, first_blocks=[2])
        rank = consumer.ranks[0]
        done(rank.pull(1, reference, [0, 1, 2, 3], tokens=TokenRange(8, 16)))
        assert rank.cache.wrong(1, [0, 1, 2, 3], range(8, 16)) == []


def test_zero_tokens_are_done_and_the_producer_is_told() -> None:
    with Side(MODEL) as producer, Side(MODEL) as consumer:
        reference = producer.publish(1, [8, 6, 7], 12)
        rank = consumer.ranks[0]
        event = done(rank.pull(1, reference, [], tokens=TokenRange(12, 12)))
        assert (event.nbytes, event.rows_posted) == (0, 0)
        assert rank.cache.wrong(1, [], range(0)) == []
        assert ended(producer.ranks[0].wait_for()[0]).how is End.DONE


@pytest.mark.parametrize(("local", "remote"), [(8, 4), (4, 8), (16, 4), (4, 16), (6, 4)])
def test_block_sizes_differ(local: int, remote: int) -> None:
    theirs, mine = replace(MODEL, block=remote), replace(MODEL, block=local)
    with Side(theirs) as producer, Side(mine) as consumer:
        tokens = 29
        here, there = list(range(9))[: -(-tokens // local)], list(range(15, 5, -1))[: -(-tokens // remote)]
        reference = producer.publish(3, there, tokens)
        rank = consumer.ranks[0]
        done(rank.pull(3, reference, here))
        assert rank.cache.wrong(3, here, range(tokens)) == []


STAGES = (("layer0", "layer1"), ("layer2",))


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"tp_size": 2}, {}),
        ({}, {"tp_size": 2}),
        ({"tp_size": 4}, {"tp_size": 2}),
        ({"tp_size": 2}, {"tp_size": 4}),
        ({"tp_size": 8}, {}),
        ({"tp_size": 8}, {"tp_size": 2}),
        ({}, {"tp_size": 8}),
        ({"stages": STAGES}, {}),
        ({}, {"stages": STAGES}),
        ({"stages": STAGES, "tp_size": 2}, {}),
        ({"tp_size": 2, "dcp_size": 2}, {}),
        ({"tp_size": 4, "dcp_size": 2, "interleave": 2}, {"tp_size": 2}),
        ({}, {"tp_size": 2, "dcp_size": 2, "interleave": 4}),
        ({"stages": STAGES}, {"tp_size": 2, "stages": (("layer0",), ("layer1", "layer2"))}),
    ],
    ids=str,
)
def test_engines_of_several_ranks(theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    model = replace(MODEL, layers=3)
    with Side(model.split(**theirs)) as producer, Side(model.split(**mine)) as consumer:
        reference = producer.publish(9, [3, 1, 4], 11)
        assert reference.tp_size == theirs.get("tp_size", 1)
        for rank in consumer.ranks:
            rank.engine.pull(9, reference, [5, 9, 2])
        for rank in consumer.ranks:
            done(rank.wait_for()[0])
            assert rank.cache.wrong(9, [5, 9, 2], range(11)) == []
        for sender in producer.ranks:  # also those that nobody reads
            assert ended(sender.wait_for()[0]).how is End.DONE
            assert sender.engine.stats()["leases"] == 0


def test_several_groups_have_their_own_blocks() -> None:
    model = replace(MODEL, groups=2, layers=4)
    with Side(model) as producer, Side(model) as consumer:
        sender, rank = producer.ranks[0], consumer.ranks[0]
        sender.cache.write(1, [1, 2, 3], range(12))
        for layer in (1, 3):  # the odd layers are in group 1, which uses other blocks
            moved = sender.cache.tensors[f"layer{layer}"]
            moved[[9, 8, 7]] = moved[[1, 2, 3]].copy()
            moved[[1, 2, 3]] = -1
        reference = sender.engine.publish(1, [[1, 2, 3], [9, 8, 7]], 12)
        done(rank.pull(1, reference, [[4, 5, 6], [10, 11, 12]]))
        for layer in (1, 3):
            moved = rank.cache.tensors[f"layer{layer}"]
            moved[[4, 5, 6]], moved[[10, 11, 12]] = moved[[10, 11, 12]].copy(), moved[[4, 5, 6]].copy()
        assert rank.cache.wrong(1, [4, 5, 6], range(12)) == []


def test_several_consumers_and_the_lease_ends_with_the_last() -> None:
    with Side(MODEL) as producer, Side(MODEL) as one, Side(MODEL) as two:
        reference = producer.publish(1, [8, 6, 7], 12, consumers=2)
        done(one.ranks[0].pull(1, reference, [0, 1, 2]))
        done(one.ranks[0].pull(2, reference, [3, 4, 5]))  # the same consumer again does not count twice
        time.sleep(0.2)
        assert producer.ranks[0].engine.poll() == []
        done(two.ranks[0].pull(1, reference, [0, 1, 2]))
        assert ended(producer.ranks[0].wait_for()[0]).how is End.DONE
        assert two.ranks[0].cache.wrong(1, [0, 1, 2], range(12)) == []


@pytest.mark.parametrize("request_id", ["x" * 300, "röq/…\n\0\ud800", b"\xff\x00\xfe", ("a", 1), 17, frozenset({1})])
def test_request_ids_may_be_anything_hashable(request_id: Hashable) -> None:
    with Side(MODEL) as producer, Side(MODEL) as consumer:
        sender, rank = producer.ranks[0], consumer.ranks[0]
        sender.cache.write(1, [1, 2, 3], range(12))
        params = json.loads(json.dumps(sender.engine.publish(request_id, [1, 2, 3], 12).to_params()))
        assert len(params["remote_request_id"]) <= 4096
        assert done(rank.pull(request_id, params, [4, 5, 6])).request_id == request_id
        assert rank.cache.wrong(1, [4, 5, 6], range(12)) == []
        assert ended(sender.wait_for()[0]).request_id == request_id


def test_a_reference_survives_json_and_is_the_same() -> None:
    with Side(MODEL.split(tp_size=2)) as producer:
        reference = producer.publish(1, [8, 6, 7], 12)
        assert PullReference.from_params(json.loads(json.dumps(reference.to_params()))) == reference


@pytest.mark.parametrize("host", ["[::1]:0", "localhost:0", "127.0.0.1:0"])
def test_where_an_engine_may_listen(host: str) -> None:
    config = replace(SMALL, bind=host)
    with Side(MODEL, config=config) as producer, Side(MODEL, config=config) as consumer:
        assert producer.ranks[0].engine.endpoint.port > 0
        done(consumer.ranks[0].pull(1, producer.publish(1, [1], 4), [2]))


def test_with_a_secret() -> None:
    config = replace(SMALL, secret="correct horse battery")
    with Side(MODEL.split(tp_size=2), config=config) as producer, Side(MODEL, config=config) as consumer:
        done(consumer.ranks[0].pull(1, producer.publish(1, [1, 2, 3], 12), [4, 5, 6]))
        assert consumer.ranks[0].cache.wrong(1, [4, 5, 6], range(12)) == []
        assert [ended(rank.wait_for()[0]).how for rank in producer.ranks] == [End.DONE, End.DONE]


def test_a_peer_is_described_with_the_way_it_is_read() -> None:
    config = Config(transports=("cma",))
    with Side(MODEL, "p") as producer, Side(MODEL, "c") as consumer:
        done(consumer.ranks[0].pull(1, producer.publish(1, [1], 4), [2]))
        text = consumer.ranks[0].engine.describe()
        assert "transport memory: one-sided, reach process" in text
        assert "peer p: memory (memmove) chosen" in text
    with Side(MODEL, transport="cma", config=config) as producer, Side(MODEL, "c", config=config) as consumer:
        event = consumer.ranks[0].pull(1, producer.publish(1, [1], 4), [2])
        assert "cma: not offered by this side" in str(event)


@pytest.mark.parametrize(
    ("theirs", "ours", "pinned", "chosen"),
    [
        ("memory+cma", "memory+cma", (), "memory"),
        ("memory+cma", "memory+cma", ("cma", "memory"), "cma"),
        ("cma", "memory+cma", (), "cma"),
        ("memory", "memory+cma", (), "memory"),
        ("memory+cma", "cma", (), "cma"),
    ],
)
def test_the_best_transport_that_both_sides_have(theirs: str, ours: str, pinned: tuple[str, ...], chosen: str) -> None:
    config = replace(SMALL, transports=pinned)
    with Side(MODEL, "p", theirs) as producer, Side(MODEL, transport=ours, config=config) as consumer:
        rank = consumer.ranks[0]
        assert done(rank.pull(1, producer.publish(1, [1], 4), [2])).via[0].startswith(chosen)
        text = rank.engine.describe()
        assert re.search(rf"peer p: .*{chosen} \(\w+\) chosen", text)
        if chosen not in ours.split("+", maxsplit=1)[0]:
            assert "memory: not offered by the peer; " in text or pinned


def test_completion_does_not_wait_for_the_caller_s_poll() -> None:
    theirs = replace(MODEL, block=8)
    with Side(theirs) as producer, Side(MODEL) as consumer:
        reference = producer.publish(1, [8, 6], 12)
        rank = consumer.ranks[0]
        rank.engine.pull(1, reference, [0, 1, 2])
        # nobody polls the consumer: reshape, fence and done message run all the same
        assert ended(producer.ranks[0].wait_for()[0]).how is End.DONE
        assert rank.cache.wrong(1, [0, 1, 2], range(12)) == []
        done(rank.wait_for()[0])


def test_digests_agree_and_name_the_first_difference() -> None:
    config = replace(SMALL, verify="digest")
    with Side(MODEL, config=config) as producer, Side(MODEL, config=config) as consumer:
        done(consumer.ranks[0].pull(1, producer.publish(1, [1, 2, 3], 12), [4, 5, 6]))
        assert consumer.ranks[0].cache.wrong(1, [4, 5, 6], range(12)) == []
    with Side(MODEL) as producer, Side(MODEL, config=config) as consumer:
        event = consumer.ranks[0].pull(1, producer.publish(1, [1, 2, 3], 12), [4, 5, 6])
        assert "this engine makes no checksums: set KVRDMA_VERIFY=digest" in str(event)
