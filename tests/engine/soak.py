"""Many pulls: nothing grows. And a producer that reuses its blocks at once under readers that come late."""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrdma.config import Config
from kvrdma.engine import PullDone, PullFailed
from kvrdma.errors import LeaseRevokedError
from tests.helpers import producer_process as at
from tests.helpers.tagged import Model, Side, busy, done

MODEL = Model(layers=4, heads=4, block=16, blocks=128)
BLOCKS = 4


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / (1 << 20)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def run(transport: str, pulls: int) -> dict[str, Any]:
    """Pull again and again between two engines of this process; say what has grown since the first quarter."""
    wrong, before = 0, (0, 0, 0.0)
    began_s = time.monotonic()
    with Side(MODEL, transport=transport) as producer, Side(MODEL, transport=transport) as consumer:
        rank, sender = consumer.ranks[0], producer.ranks[0]
        for number in range(pulls):
            blocks = [(number + i) % MODEL.blocks for i in range(BLOCKS)]
            reference = producer.publish(number, blocks, BLOCKS * MODEL.block)
            done(rank.pull(number, reference, blocks[::-1]))
            wrong += rank.cache.wrong_rows(number, blocks[::-1], range(BLOCKS * MODEL.block))
            while sender.engine.stats()["leases"] > 8:
                time.sleep(0.001)
            sender.engine.poll()
            rank.events.clear()
            if number == pulls // 4:
                before = _open_files(), threading.active_count(), _resident_mb()
        after = _open_files(), threading.active_count(), _resident_mb()
        assert busy(rank.engine) == {}
    return {
        "soak": transport,
        "pulls": pulls,
        "seconds": round(time.monotonic() - began_s, 1),
        "wrong_rows": wrong,
        "fds_grown": after[0] - before[0],
        "threads_grown": after[1] - before[1],
        "rss_grown_mb": round(after[2] - before[2], 2),
    }


def stress(transport: str, pulls: int, seed: int) -> Counter[str]:
    """Pull late from a process that withdraws at random and overwrites at once; count what came of it."""
    rng = random.Random(seed)
    config = Config(lease_s=0.5, pull_timeout_s=10.0)
    seen: Counter[str] = Counter(wrong_rows=0, other=0)
    process, _ = at.start(MODEL, "producer", transport, config)
    with Side(MODEL, transport=transport, config=replace(config, lease_s=30.0)) as consumer:
        rank, free, number = consumer.ranks[0], deque(range(MODEL.blocks)), 0
        while number < pulls:
            references = process.call(at.publish, 16, BLOCKS, number)
            process.call(at.withdraw_later, rng.choice((0.002, 0.01, 0.03)))
            number += len(references)
            waiting: dict[object, tuple[int, list[int], int]] = {}
            for each, params in references:
                blocks = [free.popleft() for _ in range(BLOCKS)]
                waiting[each] = each, blocks, params["remote_num_tokens"]
                rank.engine.pull(each, params, blocks)
                time.sleep(rng.choice((0, 0, 0.0005, 0.002)))
            while waiting:
                for event in rank.engine.wait(1.0):
                    each, blocks, tokens = waiting.pop(event.request_id)
                    if isinstance(event, PullDone):
                        seen["done"] += 1
                        seen["wrong_rows"] += rank.cache.wrong_rows(each, blocks, range(tokens))
                    elif isinstance(event, PullFailed) and isinstance(event.reason, LeaseRevokedError):
                        seen["LeaseRevokedError"] += 1
                        seen["after the data had arrived"] += "before the data had arrived" in str(event.reason)
                    else:
                        seen["other"] += 1
                    free.extend(blocks)
    process.kill()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pulls", type=int, default=20_000)
    parser.add_argument("--transport", action="append", help="cma and ucx by default")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for transport in options.transport or ["cma", "ucx"]:
        sys.stdout.write(json.dumps(run(transport, options.pulls)) + "\n")
        seen = stress(transport, options.pulls // 4, int(time.time()))
        sys.stdout.write(json.dumps({"stress": transport, "pulls": options.pulls // 4, **seen}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
