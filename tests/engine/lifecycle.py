"""Random lives of engines without threads: one clock, one place where anything happens, every fault there is.

Run many with ``python -m tests.engine.lifecycle --seeds 200 --steps 5000``.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from kvrdma import handshake
from kvrdma.config import Config
from kvrdma.engine.background import Work
from kvrdma.engine.consumer import Consumer, Counts
from kvrdma.engine.events import Ended, Event, PullDone, PullFailed, PullReleased, Stats
from kvrdma.engine.links import Home, connect_engine
from kvrdma.engine.loop import Loop
from kvrdma.engine.parts import Parts
from kvrdma.engine.peers import Peers
from kvrdma.engine.producer import Producer
from kvrdma.engine.pull import Wanted
from kvrdma.engine.shape import Shaper
from kvrdma.engine.tenant import Tenant
from kvrdma.errors import KVRDMAError, UnreachableError
from kvrdma.handshake import Identity
from kvrdma.layout import KVLayout
from kvrdma.lease import FenceTable, LeaseBook
from kvrdma.memory import RegisteredMemory
from kvrdma.plan import BlockSpan, TokenRange
from kvrdma.reference import PullReference
from kvrdma.sidechannel import Endpoint
from kvrdma.testing import FakeClock, Fault, FaultTransport
from kvrdma.transport import open_transport
from kvrdma.wire import Message, RankDescription
from tests.helpers.tagged import Model, TaggedCache

CONFIG = Config(lease_s=6.0, pull_timeout_s=10.0, breaker_cooldown_s=3.0, peer_idle_s=30.0, fence_slots=8)
FAULTS = (
    *[Fault.NONE] * 6,
    Fault.LATE,
    Fault.LATE,
    Fault.STUCK,
    Fault.FAIL_AT_POLL,
    Fault.FAIL_AT_POST,
    Fault.HALF_WRITTEN,
    Fault.INLINE,
    Fault.LOSE_PEER,
)


@dataclass
class Asked:
    """A pull that was asked for: what it should bring, and what has been reported of it."""

    request: int
    blocks: list[int]
    tokens: TokenRange
    quarantined: bool = False


class Node:
    """The memory of one engine, and its pool of blocks."""

    def __init__(self, world: World, name: str, model: Model) -> None:
        self.world = world
        self.model = model
        self.cache = TaggedCache(model)
        self.free = list(range(model.blocks))
        self.identity = Identity(name, model.shape, model={"model": "tagged"})
        self.layout = KVLayout.from_tensors(self.cache.tensors, self.cache.specs())
        self.fence = FenceTable(CONFIG.fence_slots, 64)
        self.transport = FaultTransport(open_transport("memory"))
        fence = self.fence.addr, self.fence.nbytes
        self.memory = RegisteredMemory([self.transport], self.layout, self.cache.tensors, fence)
        self.stats = Stats()

    def take(self, count: int) -> list[int]:
        return [self.free.pop(self.world.rng.randrange(len(self.free))) for _ in range(count)]


class ProducerNode(Node):
    def __init__(self, world: World, name: str, model: Model, port: int) -> None:
        super().__init__(world, name, model)
        self.endpoint = Endpoint("127.0.0.1", port)
        book = LeaseBook(self.fence, CONFIG.lease_s)
        self.producer = Producer(book, self.stats, world.clock, self.ended)
        self.live: dict[int, list[int]] = {}
        self.producer.describe_as(
            RankDescription(
                engine_id=name,
                generation=self.producer.generation,
                rank=(0, 0),
                host="127.0.0.1",
                port=port,
                model={"model": "tagged"},
                layout=handshake.pack_layout(self.layout),
                offers=self.memory.offers(),
            ),
            model.shape,
            None,
        )

    def publish(self) -> None:
        blocks_needed = self.world.rng.randint(1, 3)
        if len(self.free) < blocks_needed or len(self.live) == CONFIG.fence_slots:
            return
        request = self.world.requests = self.world.requests + 1
        tokens = blocks_needed * self.model.block - self.world.rng.randrange(self.model.block)
        blocks = self.live[request] = self.take(blocks_needed)
        self.cache.write(request, blocks, range(tokens))
        key = self.producer.publish(request, 1, None)
        reference = PullReference(
            engine_id=self.identity.engine_id,
            engine_generation=self.producer.generation,
            host=self.endpoint.host,
            port=self.endpoint.port,
            lease=key,
            num_tokens=tokens,
            blocks=(tuple(blocks),),
            first_blocks=(0,),
            request_id=str(request),
            lease_s=CONFIG.lease_s,
        )
        self.world.references.append((request, reference))
        del self.world.references[:-12]

    def ended(self, end: Ended) -> None:
        assert isinstance(end.request_id, int)
        blocks = self.live.pop(end.request_id)  # a KeyError here: it ended twice
        self.cache.poison(blocks)  # reused at once
        self.free += blocks


class ConsumerNode(Node):
    def __init__(self, world: World, name: str, model: Model) -> None:
        super().__init__(world, name, model)
        self.loop = Loop([self.transport], world.clock)
        home = Home(CONFIG, self.identity, self.layout, self.memory.transports, world.ask)
        self.peers = Peers(CONFIG, partial(connect_engine, home), world.jobs.append, self.loop, self.stats)
        self.tenant = Tenant(world, self.identity, world.clock)
        self.asked: dict[int, Asked] = {}
        self.pulls = 0
        self.consumer = Consumer(
            Parts(
                config=CONFIG,
                loop=self.loop,
                fence=self.fence,
                peers=self.peers,
                tenant=self.tenant,
                stats=self.stats,
                ask=world.ask,
                finish=Shaper(self.layout, self.cache.tensors).finish,
                background=world.jobs.append,
                report=self.reported,
            )
        )

    def pull(self) -> None:
        if not self.world.references:
            return
        recent = self.world.references[-3:] if self.world.rng.random() < 0.8 else self.world.references
        request, reference = self.world.rng.choice(recent)
        count = -(-reference.num_tokens // self.model.block)
        if len(self.free) < count:
            return
        start = self.world.rng.choice((0, 0, self.world.rng.randint(0, reference.num_tokens)))
        self.pulls += 1
        asked = Asked(request, self.take(count), TokenRange(start, reference.num_tokens))
        self.asked[self.pulls] = asked
        now_s = self.world.clock()
        wanted = Wanted(self.pulls, reference, [BlockSpan(asked.blocks)], asked.tokens, now_s, now_s + 10.0)
        self.loop.run(partial(self.consumer.start, wanted))

    def reported(self, event: Event) -> None:
        assert not isinstance(event, Ended)
        assert isinstance(event.request_id, int)
        asked = self.asked[event.request_id]  # a KeyError here: it was reported twice
        kind = type(event).__name__
        if isinstance(event, PullFailed):
            assert not asked.quarantined, "failed twice"
            kind = type(event.reason).__name__
            assert "defect" not in str(event.reason), event
            if event.quarantined:
                asked.quarantined = True
                self.world.seen["quarantined"] += 1
                return
        assert isinstance(event, PullReleased) == asked.quarantined
        if isinstance(event, PullDone):
            wrong = self.cache.wrong_rows(asked.request, asked.blocks, range(*asked.tokens))
            assert wrong == 0, f"{event}: {wrong} wrong rows of request {asked.request}"
            kind += f" in {event.attempts}"
        self.world.seen[kind] += 1
        del self.asked[event.request_id]
        self.cache.poison(asked.blocks)  # whoever writes here from now on is found
        self.free += asked.blocks

    def check(self) -> None:
        held = [block for asked in self.asked.values() for block in asked.blocks]
        assert sorted(self.free + held) == list(range(self.model.blocks)), "the pool lost or gained a block"
        assert (self.cache.store[:, self.free] == -1515870811).all(), "a block was written after it was handed back"

    def abort(self) -> None:
        if self.pulls:
            self.consumer.abort(self.world.rng.randint(max(1, self.pulls - 6), self.pulls))


class World:
    """Two producers that die and come back, two consumers, and the messages between them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.jobs: list[Work] = []
        self.post: list[tuple[Endpoint, Message]] = []
        self.references: list[tuple[int, PullReference]] = []
        self.requests = 0
        self.seen: Counter[str] = Counter()
        small = Model(blocks=12)
        self.producers = [ProducerNode(self, f"p{n}", small, 7000 + n) for n in range(2)]
        models = [small, replace(small, block=self.rng.choice((2, 8)))]
        self.consumers = [ConsumerNode(self, f"c{n}", model) for n, model in enumerate(models)]

    # What connects them

    def ask(self, endpoint: Endpoint, message: Message) -> Message:
        for node in self.producers:
            if node.endpoint == endpoint and self.rng.random() < 0.99:
                return node.producer.answer(message)
        raise UnreachableError(f"nobody listens at {endpoint}")

    def send(self, endpoint: Endpoint, message: Message, keep_trying_s: float) -> None:
        assert keep_trying_s > 0
        self.post.append((endpoint, message))

    def deliver(self) -> None:
        """Deliver a message: in any order, perhaps twice, perhaps never."""
        if not self.post:
            return
        endpoint, message = self.post[self.rng.randrange(len(self.post))]
        fate = self.rng.random()
        if fate < 0.85:
            self.post.remove((endpoint, message))
        if fate > 0.05:
            for node in self.producers:
                if node.endpoint == endpoint:
                    node.producer.answer(message)

    # What happens

    def restart(self) -> None:
        index = self.rng.randrange(2)
        old = self.producers[index]
        old.transport.close()
        self.producers[index] = ProducerNode(self, old.identity.engine_id, old.model, old.endpoint.port)

    def run_job(self) -> None:
        if self.jobs:
            self.jobs.pop(self.rng.randrange(len(self.jobs)))()

    def withdraw(self) -> None:
        node = self.rng.choice(self.producers)
        if node.live:
            node.producer.withdraw(self.rng.choice(list(node.live)))

    def hold(self) -> None:
        if self.references:
            node = self.rng.choice(self.consumers)
            number = self.rng.randint(node.pulls, node.pulls + 3)
            node.consumer.hold(("held", number), self.rng.choice(self.references)[1], self.rng.uniform(0.1, 20))

    def decline(self) -> None:
        if self.references:
            self.rng.choice(self.consumers).consumer.decline(self.rng.choice(self.references)[1])

    def inject(self) -> None:
        self.rng.choice(self.consumers).transport.inject(*self.rng.choices(FAULTS, k=self.rng.randint(1, 4)))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for node in self.producers:
            node.producer.expire()
        for each in self.consumers:
            each.tenant.beat()

    def step_all(self) -> None:
        for node in self.consumers:
            node.loop.step(0, node.consumer.take)

    def step(self) -> None:
        rng = self.rng
        actions: list[tuple[Callable[[], object], int]] = [
            (lambda: rng.choice(self.producers).publish(), 12),
            (lambda: rng.choice(self.consumers).pull(), 16),
            (self.step_all, 60),
            (self.run_job, 25),
            (self.deliver, 14),
            (self.inject, 6),
            (rng.choice(self.consumers).transport.release, 4),
            (lambda: rng.choice(self.consumers).abort(), 3),
            (self.withdraw, 2),
            (self.hold, 2),
            (self.decline, 1),
            (self.restart if rng.random() < 0.3 else self.deliver, 1),
            (lambda: self.pass_time(rng.uniform(0, 0.3)), 12),
            (lambda: self.pass_time(rng.uniform(0, 8)), 2),
            (rng.choice(self.consumers).consumer.drop_idle_peers, 1),
        ]
        rng.choices([action for action, _ in actions], [weight for _, weight in actions])[0]()
        for node in self.consumers:
            node.check()

    def drain(self) -> None:
        """Let everything come to its end."""
        for _ in range(40):
            for node in self.consumers:
                node.transport.release()
            self.step_all()
            while self.jobs:
                self.run_job()
            self.pass_time(1.0)
        for node in self.consumers:
            node.check()
            assert node.asked == {}, f"never reported: {node.asked}"
            assert node.consumer.counts() == Counts(0, 0, 0, 0, 0, 0)
            assert node.peers.connecting == 0
            assert sorted(node.free) == list(range(node.model.blocks))
            assert node.stats.quarantined == 0
        for producer in self.producers:
            assert producer.live == {}
            assert producer.producer.counts()["leases"] == 0
            assert sorted(producer.free) == list(range(producer.model.blocks))

    def close(self) -> None:
        for node in (*self.producers, *self.consumers):
            node.transport.close()


def live(seed: int, steps: int) -> Counter[str]:
    """Live through one schedule; returns what was seen how often.

    Raises:
        AssertionError: an invariant does not hold; the message says after which step.
    """
    world = World(seed)
    number = 0
    try:
        while number < steps:
            world.step()
            number += 1
        world.drain()
    except (AssertionError, KVRDMAError, KeyError) as error:
        raise AssertionError(f"seed {seed}, step {number}: {type(error).__name__}: {error}") from error
    finally:
        world.close()
    return world.seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seen: Counter[str] = Counter()
    began_s = time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        seen += live(seed, options.steps)
    seconds = time.monotonic() - began_s
    sys.stdout.write(f"{options.seeds} seeds of {options.steps} steps in {seconds:.0f} s: {dict(seen)}\n")


if __name__ == "__main__":
    main()
