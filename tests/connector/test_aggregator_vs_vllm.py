"""The aggregator gives what vLLM's gives, over random steps; only duplicates of one worker differ, on purpose."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from kvrdma.aggregator import KVOutputAggregator


class Sum:
    def __init__(self, value: int) -> None:
        self.value = value

    def aggregate(self, other: Sum) -> Sum:
        return Sum(self.value * 31 + other.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sum) and other.value == self.value

    def __hash__(self) -> int:
        return self.value


class Events:
    def __init__(self, *events: int) -> None:
        self.events, self.workers = list(events), 1

    def get_all_events(self) -> list[int]:
        return list(self.events)

    def add_events(self, events: list[int]) -> None:
        self.events += events

    def increment_workers(self, count: int) -> None:
        self.workers += count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Events) and (other.events, other.workers) == (self.events, self.workers)

    def __hash__(self) -> int:
        return self.workers


def _schedule(rng: random.Random, workers: int, steps: int) -> list[list[dict[str, Any] | None]]:
    """Each worker finishes each request once, at a random step; everything else is random."""
    plan: list[list[dict[str, Any] | None]] = [[None] * workers for _ in range(steps)]

    def at(step: int, worker: int) -> dict[str, Any]:
        found = plan[step][worker]
        if found is None:
            found = plan[step][worker] = {}
        return found

    for number in range(rng.randint(0, 12)):
        kind = rng.choice(["finished_sending", "finished_recving"])
        for worker in range(workers):
            said = at(rng.randrange(steps), worker)
            said.setdefault(kind, set()).add(f"r{number}")
            if kind == "finished_recving" and rng.random() < 0.3:
                said.setdefault("failed_recving", set()).add(f"r{number}")
    for _ in range(rng.randint(0, 10)):
        said = at(rng.randrange(steps), rng.randrange(workers))
        field = rng.choice(["kv_connector_stats", "kv_connector_worker_meta", "kv_cache_events", "invalid_block_ids"])
        value = {"kv_cache_events": Events(rng.randrange(9)), "invalid_block_ids": {rng.randrange(9)}}
        said[field] = value.get(field, Sum(rng.randrange(1, 99)))
    return plan


@pytest.mark.needs("vllm")
@pytest.mark.parametrize("seed", range(40))
def test_same_as_vllm(seed: int) -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator as Theirs
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput

    for number in range(25):
        rng = random.Random(1000 * seed + number)
        workers = rng.randint(1, 5)
        ours, theirs = KVOutputAggregator(workers), Theirs(workers)
        for step in _schedule(rng, workers, rng.randint(1, 6)):
            outputs = []
            for said in step:
                output = copy.copy(EMPTY_MODEL_RUNNER_OUTPUT)
                output.kv_connector_output = None if said is None else KVConnectorOutput(**said)
                outputs.append(output)
            rank = rng.randrange(workers)
            expected = theirs.aggregate(copy.deepcopy(outputs), rank)
            combined = ours.aggregate(copy.deepcopy(outputs), rank)
            for field in vars(expected.kv_connector_output):
                one, two = (getattr(each.kv_connector_output, field) for each in (combined, expected))
                assert one == two, (field, one, two)
