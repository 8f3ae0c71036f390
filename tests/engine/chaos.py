"""Rounds of pulls from a process that is killed, frozen, restarted or left alone at random moments.

Every success is checked row by row; every pull ends once and in time; blocks that were handed back stay untouched.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from kvrdma.config import Config
from kvrdma.engine import PullDone, PullFailed, PullReleased
from kvrdma.testing import PeerProcess
from tests.helpers import producer_process as at
from tests.helpers.ports import fixed_port
from tests.helpers.tagged import Model, Side, busy

CONFIG = Config(
    lease_s=1.5, pull_timeout_s=1.5, control_timeout_s=0.7, breaker_threshold=4, breaker_cooldown_s=0.5, fence_slots=256
)
MODEL = Model(layers=8, heads=4, block=16, blocks=256)
PULLS = 12
BLOCKS = 8
IN_TIME_S = 1.5 + 5.0 + 2.0
"""Deadline, quarantine, and what a busy machine adds."""


@dataclass
class Chaos:
    """One consumer that lives through everything, and the producers that do not."""

    transport: str
    seed: int
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.consumer = Side(MODEL, "consumer", self.transport, CONFIG)
        self.rank = self.consumer.ranks[0]
        self.free = list(range(MODEL.blocks))
        self.numbers = 0
        self.port = fixed_port()
        self.process = self._start()

    def _start(self) -> PeerProcess:
        config = replace(CONFIG, bind=f"127.0.0.1:{self.port}")
        process, self.port = at.start(MODEL, "producer", self.transport, config)
        self.fresh = True
        return process

    def round(self) -> None:
        """Publish, pull, and do something to the producer meanwhile."""
        references = self.process.call(at.publish, PULLS, BLOCKS, self.numbers)
        assert len(references) == PULLS, "the producer does not get its blocks back"
        self.numbers += PULLS
        what = self.rng.choice(("kill", "freeze", "restart", "withdraw", "nothing"))
        self.seen[what] += 1
        harm = threading.Timer(self.rng.uniform(0, 0.02), self._harm, (what,))
        waiting: dict[object, tuple[int, list[int], int]] = {}
        harm.start()
        for number, params in references:
            blocks = [self.free.pop() for _ in range(BLOCKS)]
            waiting[number] = number, blocks, params["remote_num_tokens"]
            self.rank.engine.pull(number, params, blocks)
            if self.rng.random() < 0.1:
                self.rank.engine.abort(number)
            time.sleep(self.rng.choice((0, 0, 0.002)))
        self._collect(waiting)
        harm.join()
        self._mend(what)
        if what == "nothing" and not self.fresh:
            self.seen["undisturbed rounds"] += 1
        self.fresh = False

    def _harm(self, what: str) -> None:
        if what in {"kill", "restart"}:
            self.process.kill()
        if what == "freeze":
            self.process.signal(signal.SIGSTOP)
        if what == "withdraw":
            self.process.call(at.withdraw_later, 0.02)

    def _mend(self, what: str) -> None:
        if what == "freeze":
            time.sleep(self.rng.choice((0.0, 0.3, 1.0)))
            self.process.signal(signal.SIGCONT)
            if self.rng.random() < 0.3:
                self.process.kill()
        if what == "kill" or self.process._process.exitcode is not None:
            self.process.kill()
            self.process = self._start()
        elif what == "restart":
            self.process = self._start()
        deadline_s = time.monotonic() + 30
        while self.process.call(at.ends)["live"]:
            assert time.monotonic() < deadline_s, "a publication never ends"
            time.sleep(0.02)

    def _collect(self, waiting: dict[object, tuple[int, list[int], int]]) -> None:
        began_s = time.monotonic()
        quarantined: set[object] = set()
        while waiting:
            for event in self.rank.engine.wait(0.1):
                assert isinstance(event, PullDone | PullFailed | PullReleased), event
                number, blocks, tokens = waiting[event.request_id]  # a KeyError here: it ended twice
                if isinstance(event, PullFailed) and event.quarantined:
                    quarantined.add(event.request_id)
                    self.seen["quarantined"] += 1
                    continue
                if isinstance(event, PullDone):
                    wrong = self.rank.cache.wrong_rows(number, blocks, range(tokens))
                    assert wrong == 0, f"{event}: {wrong} wrong rows"
                name = type(event.reason).__name__ if isinstance(event, PullFailed) else type(event).__name__
                self.seen[name] += 1
                del waiting[event.request_id]
                self.rank.cache.poison(blocks)
                self.free += blocks
            assert time.monotonic() - began_s < 2 * IN_TIME_S, f"late: {waiting} {self.rank.engine.stats()}"
        assert at.is_poison(self.rank.cache.store, self.free), "blocks were written after they were handed back"

    def close(self) -> None:
        began_s = time.monotonic()
        self.rank.engine.close()
        assert time.monotonic() - began_s < 10
        assert busy(self.rank.engine) == {}
        self.consumer.close()
        self.process.kill()


def run(transport: str, rounds: int, seed: int) -> dict[str, object]:
    """Live through ``rounds``; returns what was seen how often."""
    chaos = Chaos(transport, seed)
    began_s, fds, threads = time.monotonic(), 0, 0
    try:
        for number in range(rounds):
            chaos.round()
            if number == rounds // 3:
                fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208
        grown = len(os.listdir("/proc/self/fd")) - fds, threading.active_count() - threads  # noqa: PTH208
    finally:
        chaos.close()
    return {
        "chaos": transport,
        "rounds": rounds,
        "seconds": round(time.monotonic() - began_s),
        "fds_grown": grown[0],
        "threads_grown": grown[1],
        **dict(sorted(chaos.seen.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--transport", action="append", help="cma and ucx by default")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for transport in options.transport or ["cma", "ucx"]:
        result = run(transport, options.rounds, options.seed)
        sys.stdout.write(json.dumps({**result, "seed": options.seed}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
