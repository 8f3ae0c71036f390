"""Connections to the ranks of a peer engine: made by the handshake, in a thread of its own for each peer."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy.ma  # noqa: F401 - np.unique imports it at its first call: 15 ms of the first handshake

from kvrdma import handshake
from kvrdma.config import Config
from kvrdma.errors import (
    ConfigError,
    ConnectError,
    IncompatibleError,
    KVRDMAError,
    MessageError,
    PlanError,
    TransportError,
)
from kvrdma.handshake import Identity
from kvrdma.layout import KVLayout
from kvrdma.plan import Planner
from kvrdma.reference import PeerKey, PullReference
from kvrdma.sidechannel import Endpoint, SideChannelClient
from kvrdma.topology import EngineShape, RankId
from kvrdma.transport import Peer, Transport
from kvrdma.wire import DescribeRanks, Message, RankDescription, RanksDescribed

Ask: TypeAlias = Callable[[Endpoint, Message], Message]
"""Sends a control message and waits for its answer; raises ``KVRDMAError``."""
_REFUSED_S = 0.25
"""A producer that listens no more after it has made a reference does not come back as the same."""


def asking(config: Config) -> Ask:
    """Ask over the side channel, with the settings' secret and time limit."""

    def ask(endpoint: Endpoint, message: Message) -> Message:
        with SideChannelClient(endpoint, config.secret, refused_s=_REFUSED_S) as client:
            return client.request(message, config.control_timeout_s)

    return ask


@dataclass(frozen=True, slots=True)
class RankLink:
    """One source rank and the way its memory is read."""

    rank: RankId
    transport: Transport
    peer: Peer
    fence_region: int
    """Index of its fence table among the peer's regions."""
    mailbox: Endpoint

    @property
    def via(self) -> str:
        """For people: transport and mechanism."""
        return f"{self.peer.transport} ({self.peer.via})"


@dataclass(frozen=True, slots=True)
class Reader:
    """A producer rank that has to hear when this rank is done."""

    mailbox: Endpoint
    readers: tuple[int, ...]


@dataclass(slots=True)
class PeerEngine:
    """A connected peer engine; ``links`` follow the planner's sources."""

    key: PeerKey
    planner: Planner
    links: tuple[RankLink, ...]
    tell: tuple[Reader, ...]
    why: tuple[str, ...]
    """For people: per source rank, what was tried and chosen."""
    via: tuple[str, ...]
    """Transport and mechanism per source rank."""
    used_s: float = float("-inf")
    """When a pull last asked for it."""
    heard_s: float = float("-inf")
    """When a read from it last ended well."""

    def disconnect(self) -> None:
        """Disconnect every rank; reads in flight end as failed."""
        for link in self.links:
            link.transport.disconnect(link.peer)


@dataclass(frozen=True, slots=True)
class Home:
    """What of this side a handshake needs."""

    config: Config
    identity: Identity
    layout: KVLayout
    transports: Mapping[str, Transport]
    ask: Ask


def connect_engine(home: Home, reference: PullReference) -> PeerEngine:
    """Ask the producer for its ranks, check that both sides fit, and connect to the ranks to read. Blocks.

    Raises:
        KVRDMAError: the peer is not allowed, cannot be reached, does not fit or cannot be read; says why.
    """
    endpoint = allowed(Endpoint(reference.host, reference.port), home.config.allow_peers)
    shape = handshake.remote_shape(home.identity.shape, reference)
    asked = handshake.ranks_to_ask(home.identity, shape, reference.pp_size)
    described = _describe(home, endpoint, reference, asked)
    layouts = {rank: handshake.unpack_layout(text.layout) for rank, text in described.items()}
    shape = handshake.with_stages(shape, layouts, reference.pp_size)
    sources = handshake.sources_for(home.identity, shape)
    planner = Planner(home.layout, layouts, sources)
    tell = _who_to_tell(home, shape, described)
    links: list[RankLink] = []
    why: list[str] = []
    try:
        for source in sources:
            link, tried = _connect_rank(home, source.rank, described[source.rank], layouts[source.rank])
            links.append(link)
            why.append(tried)
    except KVRDMAError:
        for link in links:
            link.transport.disconnect(link.peer)
        raise
    return PeerEngine(reference.peer, planner, tuple(links), tell, tuple(why), tuple(link.via for link in links))


def allowed(endpoint: Endpoint, allow: Sequence[str]) -> Endpoint:
    """Give the endpoint back, if this engine may talk to its host.

    Raises:
        ConfigError: it may not.
    """
    if allow and endpoint.host not in allow:
        addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in endpoint.resolve()]
        networks = [ipaddress.ip_network(text, strict=False) for text in allow if _is_network(text)]
        if not addresses or not all(any(address in network for network in networks) for address in addresses):
            raise ConfigError(
                f"the reference leads to host {endpoint.host!r}, which KVRDMA_ALLOW_PEERS ({', '.join(allow)}) "
                "does not admit: add it, or find out who made this reference"
            )
    return endpoint


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _describe(
    home: Home, endpoint: Endpoint, reference: PullReference, ranks: Sequence[RankId]
) -> dict[RankId, RankDescription]:
    reply = home.ask(endpoint, DescribeRanks(reference.engine_id, tuple((rank.pp_rank, rank.rank) for rank in ranks)))
    if not isinstance(reply, RanksDescribed) or len(reply.ranks) != len(ranks):
        raise MessageError(
            f"{endpoint} did not describe the {len(ranks)} ranks asked for, but sent {type(reply).__name__}"
        )
    for rank, text in zip(ranks, reply.ranks, strict=True):
        if tuple(text.rank) != tuple(rank):
            raise MessageError(f"{endpoint} described rank {text.rank} where {tuple(rank)} was asked for")
        handshake.check_description(home.identity.model, text, reference)
    return dict(zip(ranks, reply.ranks, strict=True))


def _connect_rank(home: Home, rank: RankId, described: RankDescription, layout: KVLayout) -> tuple[RankLink, str]:
    """Connect by the best transport that both sides have and that works; also say what was tried."""
    order = home.config.transports or handshake.preference(
        {name: transport.capabilities() for name, transport in home.transports.items()}
    )
    tried: list[str] = []
    emulated: RankLink | None = None
    for name in order:
        if name not in home.transports or name not in described.offers:
            tried.append(f"{name}: not offered by {'the peer' if name in home.transports else 'this side'}")
            continue
        try:
            link = _link(home.transports[name], rank, described, layout)
        except TransportError as error:
            tried.append(f"{name}: {error}")
            continue
        if link.peer.one_sided or (emulated is None and name == order[-1]):
            if emulated is not None:
                emulated.transport.disconnect(emulated.peer)
            return link, "; ".join([*tried, f"{link.via} chosen"])
        tried.append(f"{link.via}: served by the peer's CPU")
        if emulated is None:
            emulated = link
        else:
            link.transport.disconnect(link.peer)
    if emulated is not None:
        return emulated, "; ".join([*tried, f"{emulated.via} chosen"])
    raise ConnectError(f"rank {tuple(rank)} of engine {described.engine_id} cannot be read: {'; '.join(tried)}")


def _link(transport: Transport, rank: RankId, described: RankDescription, layout: KVLayout) -> RankLink:
    offer = described.offers[transport.name]
    expected = len(layout.regions) + 1
    if len(offer.keys) != expected:
        raise MessageError(
            f"rank {tuple(rank)} offers {len(offer.keys)} keys for {expected} regions: the same kvrdma on both sides?"
        )
    peer = transport.connect(offer.address, offer.keys)
    for index, (region, store) in enumerate(zip(peer.regions, layout.regions, strict=False)):
        if region.nbytes < store.nbytes:
            transport.disconnect(peer)
            raise PlanError(
                f"region {index} of rank {tuple(rank)}: key of {region.nbytes} bytes, {store.nbytes} needed"
            )
    return RankLink(rank, transport, peer, expected - 1, Endpoint(described.host, described.port))


def _who_to_tell(home: Home, shape: EngineShape, described: Mapping[RankId, RankDescription]) -> tuple[Reader, ...]:
    identity = home.identity
    mine = handshake.flat_rank(identity.shape, identity.rank)
    told = []
    for rank, text in described.items():
        readers = handshake.readers_of(identity, shape, rank)
        if mine in readers:
            mailbox = allowed(Endpoint(text.host, text.port), home.config.allow_peers)
            address = mailbox.resolve()[0]  # once, here: the outbox must not wait for DNS
            told.append(Reader(Endpoint(address, text.port), readers))
    if not told:
        raise IncompatibleError(
            f"rank {tuple(identity.rank)} of {identity.engine_id} has nobody to read from or to tell among ranks "
            f"{[tuple(rank) for rank in described]} of the producer: does the reference name all its ranks?"
        )
    return tuple(told)
