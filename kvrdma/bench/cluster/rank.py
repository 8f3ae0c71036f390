"""One rank of a multi-node benchmark: who it is, and the engine it runs."""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass

from kvrdma.bench.cluster.cache import RankCache, slots_of
from kvrdma.bench.cluster.exchange import Exchange
from kvrdma.bench.cluster.scenario import Group, Scenario
from kvrdma.config import Config
from kvrdma.engine import Engine
from kvrdma.errors import ConfigError
from kvrdma.handshake import Identity
from kvrdma.sidechannel import Endpoint
from kvrdma.topology import RankId

START_S = 120.0
"""How long ranks may take to come up."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a process is."""

    role: str
    """``"producer"`` or ``"consumer"``."""
    engine: int
    """Number among the engines of its role."""
    rank: RankId
    index: int
    """Number among the ranks of its engine; 0 speaks for it."""

    @property
    def engine_id(self) -> str:
        """Name of its engine."""
        return f"{self.role}{self.engine}"


def place_of(scenario: Scenario, number: int, world: int) -> Place:
    """Give processes their places: producers first, engine by engine.

    Raises:
        ConfigError: there are more or fewer processes than ranks.
    """
    if world != scenario.world:
        p, c = scenario.producer, scenario.consumer
        raise ConfigError(
            f"{world} processes, but the scenario has {scenario.world} ranks (producers {p.engines} x tp {p.tp} x pp "
            f"{p.pp}, consumers {c.engines} x tp {c.tp} x pp {c.pp}): --nnodes times --nproc-per-node must be that"
        )
    producers = scenario.producer.engines * scenario.producer.ranks
    role, group = ("producer", scenario.producer) if number < producers else ("consumer", scenario.consumer)
    within = number if role == "producer" else number - producers
    engine, index = divmod(within, group.ranks)
    return Place(role, engine, RankId(*divmod(index, group.tp)), index)


def group_of(scenario: Scenario, place: Place) -> Group:
    """Give the group a place belongs to."""
    return scenario.producer if place.role == "producer" else scenario.consumer


@dataclass(slots=True)
class Member:
    """A rank at work."""

    scenario: Scenario
    place: Place
    exchange: Exchange
    config: Config
    cache: RankCache
    engine: Engine

    @property
    def timeout_s(self) -> float:
        """How long it waits for another rank's next step."""
        return self.scenario.timeout_s + 30.0

    def reopen(self, incarnation: int) -> None:
        """Close the engine without a word and open another one of its name."""
        self.engine.close()
        self.engine = open_engine(self.scenario, self.place, self.exchange, self.config, self.cache, incarnation)


def bench_config(scenario: Scenario, config: Config, listen: str | None) -> Config:
    """Adapt settings to a benchmark: transports, deadlines, an address that other hosts reach.

    Args:
        scenario: names transports and the deadline of a pull.
        config: of the environment.
        listen: address of this host towards the others; None: as set.
    """
    changes: dict[str, object] = {
        "pull_timeout_s": scenario.timeout_s,
        "lease_s": max(config.lease_s, 4 * scenario.timeout_s),
        "breaker_threshold": 1 << 20,  # a request that is refused at once would keep its blocks for a whole lease
    }
    if scenario.transports:
        changes["transports"] = scenario.transports
    if listen is not None and config.bind == Config().bind:
        changes["bind"] = str(Endpoint(listen, 0))
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type] # each is of its field's type


def address_towards(host: str, port: int) -> str:
    """Give the address of this host from which packets go to another one."""
    address = Endpoint(host, port).resolve()[0]
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def open_engine(
    scenario: Scenario, place: Place, exchange: Exchange, config: Config, cache: RankCache, incarnation: int = 0
) -> Engine:
    """Open a rank's engine; all but the first rank wait for the first."""
    key = f"leader/{place.engine_id}/{incarnation}"
    leader = Endpoint.parse(exchange.get(key, START_S)) if place.index else None
    shape = scenario.engine_shape(group_of(scenario, place))
    identity = Identity(place.engine_id, shape, place.rank, {"model": str(scenario.model)})
    engine = Engine(cache.tensors, cache.specs, identity, config, leader=leader)
    if not place.index:
        exchange.put(key, str(engine.endpoint))
    return engine


def join(scenario: Scenario, place: Place, exchange: Exchange, config: Config) -> Member:
    """Allocate a rank's cache and open its engine."""
    cache = RankCache(scenario, group_of(scenario, place), place.rank, slots_of(scenario, place.role))
    return Member(scenario, place, exchange, config, cache, open_engine(scenario, place, exchange, config, cache))
