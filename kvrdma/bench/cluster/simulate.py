"""A model of very many engines: the real planner and the real control messages, over links that are only numbers.

Counts of rows, bytes, handshakes and done messages are exact (a test compares them with a real run); times follow from
the given latency, bandwidth and cost per row, with each rank's link serving one read at a time.
"""

from __future__ import annotations

import heapq
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from kvrdma import __version__, handshake, wire
from kvrdma.bench.cluster.cache import block_order, blocks_for, slots_of
from kvrdma.bench.cluster.scenario import Group, Scenario, layer_name
from kvrdma.bench.cluster.summary import JSON, spread
from kvrdma.errors import ConfigError
from kvrdma.handshake import Identity
from kvrdma.lease import LeaseKey
from kvrdma.models import DTYPE_BYTES
from kvrdma.plan import BlockSpan, Planner, TokenRange
from kvrdma.plan.sketch import CacheSketch, sketch_layout
from kvrdma.reference import PullReference
from kvrdma.sidechannel import Endpoint, SideChannelClient, SideChannelServer
from kvrdma.topology import RankId, Source
from kvrdma.wire import LeaseDone, RankDescription, TransportOffer

_LEASE_S = 30.0
_PEERS_WEIGHED = 32
_MESSAGES_TIMED = 500
_LOCAL_BASE = 1 << 44
_REQUESTS_EACH = 8
"""Least requests per consumer engine, so that queues form."""
_MOST_PAGES = 1 << 23
"""Of a request: 8 million rows of some 100 bytes. 2 million tokens of 60 layers in blocks of 16 have as many."""
_KEY_NBYTES, _ADDRESS_NBYTES = 280, 300
"""Of a typical key and address of a network transport with several devices."""


@dataclass(frozen=True, slots=True)
class Links:
    """What every rank's link can do."""

    latency_s: float
    bytes_per_s: float
    row_s: float

    def service_s(self, rows: int, nbytes: int) -> float:
        """Time that a read keeps a link: rows and bytes overlap, the slower counts."""
        return max(rows * self.row_s, nbytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class ReadCount:
    """What one rank reads from one source for one request."""

    source: RankId
    rows: int
    rows_posted: int
    nbytes: int


@dataclass(slots=True)
class RankModel:
    """One consumer rank, as towards any producer engine."""

    identity: Identity
    sources: tuple[Source, ...]
    asked: tuple[RankId, ...]
    told: int
    """Producer ranks that it tells when it is done."""
    planner: Planner


def sketch_of(scenario: Scenario, group: Group, role: str) -> CacheSketch:
    """Describe the cache of a rank without allocating it."""
    kv = scenario.kv
    blocks = slots_of(scenario, role) * blocks_for(group, scenario.prompt.longest)
    names = tuple(layer_name(layer) for layer in range(kv.layers))
    content = kv.head_dim * (1 if kv.mla else 2)
    return CacheSketch(group.layout, group.block, blocks, names, content, DTYPE_BYTES[kv.dtype])


class Model:
    """The engines of a scenario, one of each side standing for all."""

    def __init__(self, scenario: Scenario) -> None:
        """Plan every kind of rank; raises what the handshake would."""
        self.scenario = scenario
        self.producer = scenario.engine_shape(scenario.producer)
        self.consumer = scenario.engine_shape(scenario.consumer)
        sketch = sketch_of(scenario, scenario.producer, "producer")
        self.layouts = {rank: sketch_layout(self.producer, rank, sketch) for rank in self.producer.all_ranks()}
        self.ranks = [self._rank(rank) for rank in self.consumer.all_ranks()]
        self._counted: dict[tuple[int, int, int, int], list[ReadCount]] = {}
        self._orders: Mapping[str, np.ndarray[tuple[int], np.dtype[np.int64]]] = {
            role: block_order(scenario, sketch_of(scenario, group, role).num_blocks)
            for role, group in (("producer", scenario.producer), ("consumer", scenario.consumer))
        }

    def _rank(self, rank: RankId) -> RankModel:
        identity = Identity("consumer0", self.consumer, rank, {})
        flat = handshake.flat_rank(self.consumer, rank)
        asked = handshake.ranks_to_ask(identity, self.producer, max(1, len(self.producer.stages)))
        sources = handshake.sources_for(identity, self.producer)
        local = sketch_layout(
            self.consumer, rank, sketch_of(self.scenario, self.scenario.consumer, "consumer"), _LOCAL_BASE
        )
        planner = Planner(local, {each: self.layouts[each] for each in asked}, sources)
        told = sum(flat in handshake.readers_of(identity, self.producer, each) for each in asked)
        return RankModel(identity, sources, asked, told, planner)

    def reads(self, rank: int, tokens: int, slots: tuple[int, int] = (0, 0)) -> list[ReadCount]:
        """Plan a request: what a consumer rank reads from each source.

        Args:
            rank: number of the consumer rank in its engine.
            tokens: length of the request.
            slots: where it lies in the producer's and in the consumer's cache.
        """
        key = (rank, tokens, *slots)
        if key not in self._counted:
            spans = []
            for role, group, slot in zip(
                ("producer", "consumer"), (self.scenario.producer, self.scenario.consumer), slots, strict=True
            ):
                first = slot * blocks_for(group, self.scenario.prompt.longest)
                spans.append(BlockSpan(self._orders[role][first : first + blocks_for(group, tokens)]))
            plan = self.ranks[rank].planner.plan([spans[1]], [spans[0]], TokenRange(0, tokens))
            self._counted[key] = [
                ReadCount(each.source.rank, each.rows_before, len(each.batch), each.nbytes) for each in plan.sources
            ]
        return self._counted[key]

    def description(self, rank: RankId) -> RankDescription:
        """Give what a producer rank says of itself, with keys of a typical length."""
        keys = tuple(bytes(_KEY_NBYTES) for _ in range(len(self.layouts[rank].regions) + 1))
        return RankDescription(
            engine_id="an engine id of 36 characters, uuid4",
            generation=1 << 52,
            rank=(rank.pp_rank, rank.rank),
            host="host-0000.cluster.example",
            port=40000,
            model={"model": str(self.scenario.model)},
            layout=handshake.pack_layout(self.layouts[rank]),
            offers={"network": TransportOffer(bytes(_ADDRESS_NBYTES), keys)},
            kvrdma=__version__,
            start=1 << 52,
            sizes=handshake.size_numbers(self.producer),
        )

    def answer(self, rank: RankModel) -> bytes:
        """Give the answer to the handshake of a consumer rank."""
        return wire.encode(wire.RanksDescribed(tuple(self.description(each) for each in rank.asked)))

    def peer_nbytes(self) -> float:
        """Weigh what a rank keeps of a peer engine: descriptions, layouts, planner."""
        rank = self.ranks[0]
        frames = [self.answer(rank) for _ in range(_PEERS_WEIGHED)]
        tracemalloc.start()
        try:
            kept = [self._meet(rank, frame) for frame in frames]
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return held / len(kept)

    def _meet(self, rank: RankModel, frame: bytes) -> Planner:
        message = wire.decode(frame)
        assert isinstance(message, wire.RanksDescribed)
        layouts = {RankId(*each.rank): handshake.unpack_layout(each.layout) for each in message.ranks}
        sketch = sketch_of(self.scenario, self.scenario.consumer, "consumer")
        local = sketch_layout(self.consumer, rank.identity.rank, sketch, _LOCAL_BASE)
        planner = Planner(local, layouts, rank.sources)
        spans = [
            BlockSpan(np.arange(blocks_for(group, 1))) for group in (self.scenario.consumer, self.scenario.producer)
        ]
        planner.plan([spans[0]], [spans[1]], TokenRange(0, 1))
        return planner


def answers_per_s() -> float:
    """Measure how many control messages one thread answers in a second on this machine, over loopback."""
    server = SideChannelServer(Endpoint("127.0.0.1", 0), lambda _: wire.Noted())
    message = LeaseDone((1, 1), "an engine id of 36 characters, uuid4", 0, (0,))
    try:
        with SideChannelClient(server.endpoint) as client:
            client.request(message, 5.0)
            began_s = time.perf_counter()
            for _ in range(_MESSAGES_TIMED):
                client.request(message, 5.0)
            return _MESSAGES_TIMED / (time.perf_counter() - began_s)
    finally:
        server.close()


@dataclass(slots=True)
class Traffic:
    """What came of the requests."""

    seconds: list[float]
    ended_s: float
    rows: int
    rows_posted: int
    nbytes: int
    done_messages: int
    heartbeats: int
    handshakes: int
    busy_s: dict[tuple[int, RankId], float]


def play(model: Model, links: Links) -> Traffic:
    """Let all requests of the scenario run over the modelled links."""
    scenario = model.scenario
    producers, consumers = scenario.producer.engines, scenario.consumer.engines
    lengths, due_s = scenario.lengths(), scenario.arrivals_s()
    traffic = Traffic([], 0.0, 0, 0, 0, 0, 0, 0, defaultdict(float))
    free: dict[int, list[float]] = {c: [0.0] * scenario.arrival.concurrency for c in range(consumers)}
    out_s: dict[tuple[int, RankId], float] = defaultdict(float)
    in_s: dict[tuple[int, int], float] = defaultdict(float)
    met: set[tuple[int, int, int]] = set()
    slots = slots_of(scenario, "producer")
    for request in range(scenario.requests):
        producer, consumer = request % producers, (request + request // producers) % consumers
        begin_s = max(due_s[request], heapq.heappop(free[consumer]))
        end_s = begin_s
        for number, rank in enumerate(model.ranks):
            start_s = begin_s
            if (consumer, number, producer) not in met:
                met.add((consumer, number, producer))
                traffic.handshakes += 1
                start_s += 4 * links.latency_s
            slot = ((request // producers) % slots, 0)
            for read in model.reads(number, lengths[request], slot):
                took_s = links.service_s(read.rows_posted, read.nbytes)
                key = (producer, read.source)
                done_s = max(start_s + 2 * links.latency_s, out_s[key], in_s[consumer, number]) + took_s
                out_s[key] = in_s[consumer, number] = done_s
                traffic.busy_s[key] += took_s
                traffic.rows += read.rows
                traffic.rows_posted += read.rows_posted
                traffic.nbytes += read.nbytes
                end_s = max(end_s, done_s + 2 * links.latency_s)
            traffic.done_messages += rank.told
            traffic.heartbeats += rank.told * (1 + int((end_s - begin_s) / (_LEASE_S / 3)))
        heapq.heappush(free[consumer], end_s)
        traffic.seconds.append(end_s - begin_s)
        traffic.ended_s = max(traffic.ended_s, end_s)
    return traffic


def simulate(scenario: Scenario, engines: int, links: Links) -> JSON:
    """Model ``engines`` engines, half of them producers, and give what limits the design."""
    half = max(1, engines // 2)
    scenario = msgspec.structs.replace(
        scenario,
        producer=msgspec.structs.replace(scenario.producer, engines=half),
        consumer=msgspec.structs.replace(scenario.consumer, engines=half),
        requests=max(scenario.requests, _REQUESTS_EACH * half),
    )
    _check_rows(scenario)
    model = Model(scenario)
    traffic = play(model, links)
    return {
        "kind": "simulate",
        "kvrdma": __version__,
        "scenario": msgspec.to_builtins(scenario),
        "links": {
            "latency_us": links.latency_s * 1e6,
            "gb_per_s": links.bytes_per_s / 1e9,
            "row_ns": links.row_s * 1e9,
        },
        "result": _result(model, traffic),
    }


def _check_rows(scenario: Scenario) -> None:
    """Refuse a request whose plan would not fit into memory.

    Raises:
        ConfigError: says how many pages it has.
    """
    block = min(group.block * group.dcp for group in (scenario.producer, scenario.consumer))
    pages = -(-scenario.prompt.longest // block) * scenario.kv.layers
    if pages > _MOST_PAGES:
        raise ConfigError(
            f"a request of {scenario.prompt.longest} tokens has {pages} pages, more than the {_MOST_PAGES} that are "
            "planned here: give a smaller prompt.tokens (or prompt.most), or larger blocks"
        )


def _result(model: Model, traffic: Traffic) -> JSON:
    scenario = model.scenario
    producers, consumers = scenario.producer, scenario.consumer
    answers = [len(model.answer(rank)) for rank in model.ranks]
    peer_kb = model.peer_nbytes() / 1e3
    messages = traffic.done_messages + traffic.heartbeats
    ranks = producers.engines * producers.ranks
    rate = messages / traffic.ended_s / ranks
    able = answers_per_s()
    params = PullReference("e", 1, "h", 1, LeaseKey(1, 1), 1, (tuple(range(blocks_for(producers, scenario.prompt.tokens))),), (0,), "r")  # fmt: skip  # noqa: E501
    return {
        "engines": producers.engines + consumers.engines,
        "ranks": ranks + consumers.engines * consumers.ranks,
        "requests": scenario.requests,
        "handshake_bytes_per_rank_and_peer": round(sum(answers) / len(answers)),
        "handshake_mb_per_rank_all_peers": round(sum(answers) / len(answers) * producers.engines / 1e6, 3),
        "handshakes_per_producer_all_consumers": consumers.engines * len(model.ranks),
        "handshakes_seconds_of_one_producer": round(consumers.engines * len(model.ranks) / able, 3),
        "handshakes_made": traffic.handshakes,
        "memory_kb_per_peer": round(peer_kb, 1),
        "memory_mb_per_rank_all_peers": round(peer_kb * producers.engines / 1e3, 2),
        "reference_bytes": len(msgspec.json.encode(params.to_params())),
        "done_messages": traffic.done_messages,
        "heartbeats": traffic.heartbeats,
        "control_messages_per_s_and_producer_rank": round(rate, 1),
        "answers_per_s_of_one_thread": round(able),
        "control_load": round(rate / able, 4),
        "rows": traffic.rows,
        "rows_posted": traffic.rows_posted,
        "nbytes": traffic.nbytes,
        "seconds": round(traffic.ended_s, 4),
        "gb_per_s_and_consumer_rank": round(
            traffic.nbytes / traffic.ended_s / 1e9 / consumers.engines / consumers.ranks, 3
        ),
        "busiest_producer_link": round(max(traffic.busy_s.values()) / traffic.ended_s, 3),
        "request_ms": spread(traffic.seconds),
    }
