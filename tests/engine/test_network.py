"""Two hosts and a line that loses and delays packets, and for a while all of them. Root only."""

from __future__ import annotations

import random
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvrdma.config import Config
from kvrdma.engine import PullDone, PullFailed, PullReleased
from kvrdma.testing import PeerProcess
from tests.helpers import producer_process as at
from tests.helpers.tagged import Model, Side, busy
from tests.helpers.two_hosts import Line, TwoHosts, enter

pytestmark = [pytest.mark.needs("root"), pytest.mark.needs("ucx"), pytest.mark.needs("tun")]
MODEL = Model(layers=4, block=16, blocks=64)
SECRET = "two hosts share this"


def open_consumer(state: SimpleNamespace, config: Config) -> None:
    state.side = Side(MODEL, "consumer", "ucx", config)
    state.rank = state.side.ranks[0]


def pull_all(state: SimpleNamespace, references: list[tuple[int, dict[str, Any]]]) -> tuple[Counter[str], float]:
    """Pull them all at once; what came of it, and how long the longest took."""
    rank, seen, began_s = state.rank, Counter[str](), time.monotonic()
    owed: dict[object, tuple[list[int], int]] = {}
    for index, (number, params) in enumerate(references):
        blocks = list(range(4 * index, 4 * index + 4))
        owed[number] = blocks, params["remote_num_tokens"]
        rank.engine.pull(number, params, blocks)
    while owed:
        assert time.monotonic() - began_s < 60, rank.engine.stats()
        for event in rank.engine.wait(1.0):
            assert isinstance(event, PullDone | PullFailed | PullReleased)
            if isinstance(event, PullFailed) and event.quarantined:
                seen["quarantined"] += 1
                continue
            blocks, tokens = owed.pop(event.request_id)
            if isinstance(event, PullDone):
                assert isinstance(event.request_id, int)
                assert rank.cache.wrong_rows(event.request_id, blocks, range(tokens)) == 0
            seen[type(event).__name__] += 1
            if isinstance(event, PullFailed):
                seen[str(event.reason)[:200]] += 1
    longest_s = time.monotonic() - began_s
    while busy(rank.engine):  # a handshake for a pull that is over may still run
        assert time.monotonic() - began_s < longest_s + 10, busy(rank.engine)
        time.sleep(0.02)
    rank.cache.poison()
    return seen, longest_s


def all_free(producer: PeerProcess) -> None:
    """Wait until every word that a pull is done has crossed the line (or its lease is over)."""
    deadline_s = time.monotonic() + 60
    while (ends := producer.call(at.ends))["free"] < MODEL.blocks:
        assert time.monotonic() < deadline_s, ends
        time.sleep(0.05)


def test_a_line_that_loses_and_delays_packets_and_then_all_of_them() -> None:
    seed = random.Random(3)
    with TwoHosts(Line(delay_s=0.003, loss=0.01), offload=False) as line:
        processes = [PeerProcess({"UCX_NET_DEVICES": line.device}) for _ in range(2)]
        for process, host in zip(processes, line.hosts, strict=True):
            process.call(enter, host)
        there, here = processes
        timing = {"lease_s": 20.0, "pull_timeout_s": 10.0, "control_timeout_s": 3.0, "breaker_threshold": 100}
        configs = [Config(secret=SECRET, bind=f"{address}:0", **timing) for address in line.addresses]  # type: ignore[arg-type]
        there.call(at.open_side, MODEL, "producer", "ucx", configs[0])
        here.call(open_consumer, configs[1])
        number = 0
        for _ in range(4):
            references = there.call(at.publish, 8, 4, number)
            assert len(references) == 8
            number += 8
            seen, longest_s = here.call(pull_all, references)
            assert seen["PullDone"] == 8, seen
            all_free(there)
            assert longest_s > 2 * 0.003
            time.sleep(seed.random() / 10)
        assert line.lost > 5
        references = there.call(at.publish, 4, 4, number)
        line.loss = 1.0
        seen, longest_s = here.call(pull_all, references)
        assert seen["PullDone"] == 0
        assert seen["PullFailed"] + seen["PullReleased"] == len(references)
        assert longest_s < 10 + 5 + 10
        line.loss = 0.01
        all_free(there)
        deadline_s = time.monotonic() + 90
        while not here.call(pull_all, there.call(at.publish, 2, 4, number + 100))[0]["PullDone"]:
            number += 2
            assert time.monotonic() < deadline_s, "it does not recover"
        for process in processes:
            process.kill()
