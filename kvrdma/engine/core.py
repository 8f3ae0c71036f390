"""``Engine``: one rank's end of every transfer, as producer and as consumer."""

from __future__ import annotations

import atexit
import logging
import secrets
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

from kvrdma import __version__, handshake
from kvrdma.config import Config
from kvrdma.engine.arguments import check_caches, check_published, check_pull, time_span, whole, whole_numbers
from kvrdma.engine.background import Background
from kvrdma.engine.consumer import Consumer
from kvrdma.engine.events import Event, Stats
from kvrdma.engine.links import Home, asking, connect_engine
from kvrdma.engine.loop import Loop
from kvrdma.engine.opening import open_transports, refuse_digests, transport_lines
from kvrdma.engine.parts import Parts
from kvrdma.engine.peers import MAX_HANDSHAKES, Peers
from kvrdma.engine.process import ProcessLock
from kvrdma.engine.producer import Producer
from kvrdma.engine.pull import Wanted
from kvrdma.engine.reports import Promise, Reports
from kvrdma.engine.shape import Limits, Shaper
from kvrdma.engine.tenant import Tenant
from kvrdma.engine.threads import EngineThreads
from kvrdma.errors import MessageError, PullAbortedError, PullError, TransportClosedError
from kvrdma.handshake import Identity
from kvrdma.layout import KVLayout, TokenShare
from kvrdma.lease import FenceTable, LeaseBook, LeaseKey
from kvrdma.mailbox import Outbox
from kvrdma.memory import RegisteredMemory
from kvrdma.page_format import LayerSpec
from kvrdma.plan import BlockSpan, TokenRange
from kvrdma.reference import AnyReference, PullReference, groups_of, id_text, spans_of
from kvrdma.sidechannel import Endpoint, SideChannelClient, SideChannelServer
from kvrdma.transport import Transport
from kvrdma.wire import AnnounceRank, RankAnnounced, RankDescription

_SPARE_WORDS = 16_384
_HOLD_S = 600.0
_log = logging.getLogger(__name__)


class Engine:
    """Publishes blocks of its caches and pulls blocks of other engines into them.

    Its methods return at once and may be called from any thread; what happens is told by ``poll``, each pull and
    each publication exactly once. Everything else runs on the engine's own threads: one moves data, one
    watches the clock, one answers peers, one sends small messages, others shake hands, compare checksums and reshape.

    ``publish``, ``prepare`` and ``pull`` raise TransportClosedError once it is closed, PullError after a defect.
    """

    def __init__(
        self,
        caches: Mapping[str, Any],
        specs: LayerSpec | Mapping[str, LayerSpec],
        identity: Identity,
        config: Config | None = None,
        *,
        transports: Sequence[Transport] | None = None,
        leader: Endpoint | None = None,
    ) -> None:
        """Register the caches and start to listen.

        Args:
            caches: layer name to tensor, or to a pair of them; kept alive until ``close``. See
                ``KVLayout.from_tensors``.
            specs: what the tensors cannot say.
            identity: which rank of which engine this is.
            config: settings; ``Config.from_env()`` by default.
            transports: open transports, which the engine closes; all that work here by default.
            leader: the side channel of the rank that speaks for this engine; this rank speaks for itself by default.

        Raises:
            LayoutError, RegistrationError, ConfigError: a cache, or a setting, cannot be used.
            UnreachableError: the endpoint cannot be bound, or the leader does not answer.
        """
        check_caches(caches, specs)
        self.config = config or Config.from_env()
        self.identity = identity
        self._start_id = 1 + secrets.randbelow(1 << 52)
        self._stats = Stats()
        self._reports = Reports()
        self._lock = ProcessLock()
        self._closed = False
        shape = identity.shape
        share = TokenShare(shape.dcp_rank(identity.rank.rank), shape.dcp_size, shape.interleave)
        self.layout = KVLayout.from_tensors(caches, specs, share)
        self.limits = Limits(self.layout)
        refuse_digests(self.config, caches)
        self._fence = FenceTable(self.config.fence_slots, _SPARE_WORDS)
        self._opened, self.refused = (list(transports), {}) if transports is not None else open_transports(self.config)
        try:
            self._memory = RegisteredMemory(self._opened, self.layout, caches, (self._fence.addr, self._fence.nbytes))
            self._start(caches, leader)
        except BaseException:
            for transport in self._opened:
                transport.close()
            raise

    def _start(self, caches: Mapping[str, Any], leader: Endpoint | None) -> None:
        book = LeaseBook(self._fence, self.config.lease_s)
        self._producer = Producer(book, self._stats, time.monotonic, self._reports.add)
        bind = Endpoint.parse(self.config.bind)
        self._server = SideChannelServer(bind, self._producer.answer, self.config.secret, insecure=self.config.insecure)
        self._outbox: Outbox | None = None
        try:
            self.endpoint = Endpoint(self.config.advertise or self._server.endpoint.host, self._server.endpoint.port)
            self.side_channel = leader or self.endpoint
            digest_of = self.layout if self.config.verify == "digest" else None
            self._producer.describe_as(self.description(), self.identity.shape, digest_of)
            if leader is not None:
                self.announce(leader)
            self._outbox = Outbox(self.config.secret)
            self._consumer = self._new_consumer(self._outbox, caches)
            self._threads = EngineThreads(self._loop, self._consumer, self._peers, self._tenant, self._producer)
            self._threads.start(self._opened, self._report_the_rest)
        except BaseException:
            self._close_channels()
            raise
        atexit.register(self.close)  # whoever forgot to

    def _new_consumer(self, outbox: Outbox, caches: Mapping[str, Any]) -> Consumer:
        self._loop = Loop(list(self._memory.transports.values()), time.monotonic)
        self._handshakes = Background("handshake", MAX_HANDSHAKES)
        self._work = Background("reshape", 1)
        ask = asking(self.config)
        home = Home(self.config, self.identity, self.layout, self._memory.transports, ask)
        self._peers = Peers(
            self.config, lambda ref: connect_engine(home, ref), self._handshakes.run, self._loop, self._stats
        )
        self._tenant = Tenant(outbox, self.identity, time.monotonic)
        return Consumer(
            Parts(
                config=self.config,
                loop=self._loop,
                fence=self._fence,
                peers=self._peers,
                tenant=self._tenant,
                stats=self._stats,
                ask=ask,
                finish=Shaper(self.layout, caches).finish,
                background=self._work.run,
                report=self._reports.add,
            )
        )

    def description(self) -> RankDescription:
        """Give what a consumer needs to know of this rank."""
        return RankDescription(
            engine_id=self.identity.engine_id,
            generation=self._producer.generation,
            rank=(self.identity.rank.pp_rank, self.identity.rank.rank),
            host=self.endpoint.host,
            port=self.endpoint.port,
            model=dict(self.identity.model),
            layout=handshake.pack_layout(self.layout),
            offers=self._memory.offers(),
            kvrdma=__version__,
            start=self._start_id,
            sizes=handshake.size_numbers(self.identity.shape),
        )

    def announce(self, leader: Endpoint) -> None:
        """Tell the rank that speaks for this engine about this one. Blocks for an answer.

        Raises:
            ControlError: it does not answer, or is of another engine.
            ConfigError: this rank would be announced at no address that others can reach.
        """
        self.endpoint.as_told(None)
        with SideChannelClient(leader, self.config.secret) as client:
            reply = client.request(AnnounceRank(self.description()), self.config.control_timeout_s)
        if not isinstance(reply, RankAnnounced):
            raise MessageError(f"{leader} answered {type(reply).__name__} to the announcement of a rank")
        self._producer.generation = reply.generation

    # Producer

    def publish(
        self,
        request_id: Hashable,
        blocks: Sequence[int] | Sequence[Sequence[int]],
        num_tokens: int,
        *,
        consumers: int = 1,
        lease: LeaseKey | None = None,
        first_blocks: Sequence[int] = (),
    ) -> PullReference:
        """Let ``consumers`` engines read a request's blocks until they are done or the lease ends.

        The blocks belong to the readers until ``poll`` says that the publication has ended. Their KV must be there
        when the reference is given out.

        Args:
            request_id: names it here; may be anything hashable. One live publication each.
            blocks: block ids, or one list of them per KV group.
            num_tokens: how many positions they hold.
            consumers: how many consumer engines will read it, each with all its ranks.
            lease: the lease that another rank of this engine got for the request; ``reference.lease``.
            first_blocks: per group, which block of the sequence the first id is (sliding windows).

        Raises:
            LeaseError: published already, every lease is taken, or ``consumers`` is out of range.
            PlanError: a block is out of range or named twice, the blocks hold fewer tokens, or a number is none.
            ConfigError: this engine listens at no address that others can reach.
        """
        self._require_open()
        self.side_channel.as_told(None)
        groups, num_tokens = groups_of(blocks), whole("num_tokens", num_tokens)
        first_blocks, consumers = whole_numbers("first_blocks", first_blocks), whole("consumers", consumers)
        check_published(request_id, self.limits, groups, num_tokens, first_blocks, consumers)
        key = self._producer.publish(request_id, consumers, lease)
        return PullReference(
            engine_id=self.identity.engine_id,
            engine_generation=self._producer.generation,
            host=self.side_channel.host,
            port=self.side_channel.port,
            lease=key,
            num_tokens=num_tokens,
            blocks=groups,
            first_blocks=first_blocks or (0,) * len(groups),
            request_id=id_text(request_id),
            lease_s=self.config.lease_s,
            **handshake.sizes_of(self.identity.shape),
            live=len(self.identity.shape.all_ranks()) == 1,  # other ranks may not have published yet
        )

    def prepare(self, lease: LeaseKey) -> None:
        """Let a lease be read before ``publish`` is called for it here; see ``LeaseBook.prepare``."""
        self._require_open()
        self._producer.prepare(lease)

    def discard(self, lease: LeaseKey) -> None:
        """Take back a lease that was prepared and will not be published."""
        self._producer.discard(lease)

    def extend(self, request_id: Hashable, seconds: float) -> bool:
        """Hold a publication for ``seconds`` (ConfigError: no number) from now at least; False if it has ended."""
        return self._producer.extend(request_id, time_span("seconds", seconds))

    def withdraw(self, request_id: Hashable) -> bool:
        """Take a publication back: late consumers fail. False if it has ended already."""
        return self._producer.withdraw(request_id)

    # Consumer

    def pull(
        self,
        request_id: Hashable,
        reference: AnyReference,
        blocks: Sequence[int] | Sequence[Sequence[int]] | Sequence[BlockSpan],
        *,
        tokens: TokenRange | Sequence[TokenRange] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Fetch a published request into ``blocks``; returns at once.

        The blocks belong to the engine until ``poll`` says that the pull has ended, or was released from quarantine.

        Args:
            request_id: names it here; one pull at a time each.
            reference: what ``publish`` returned, or its ``to_params()``.
            blocks: ids of the blocks to fill, one list per KV group, or spans that do not start at token 0.
            tokens: positions to read; by default all. Start at the cached prefix, where there is one.
            timeout_s: to its end; the setting ``pull_timeout_s`` by default.

        Raises:
            MessageError: the reference is malformed.
            PlanError, ConfigError: more tokens are asked for than were published; another argument is of no use.
            PullError: a pull of that id is under way. TypeError: the id is not hashable.
        """
        self._require_open()
        reference, spans = PullReference.of(reference), spans_of(blocks)
        wanted = tokens if tokens is not None else TokenRange(0, reference.num_tokens)
        check_pull(request_id, self.limits, reference.num_tokens, spans, wanted)
        now_s = time.monotonic()
        limit_s = self.config.pull_timeout_s if timeout_s is None else time_span("timeout_s", timeout_s)
        pull, promise = Wanted(request_id, reference, spans, wanted, now_s, now_s + limit_s), Promise()
        try:
            self._reports.owe(request_id, promise)  # from here on it is reported, whatever happens
            self._loop.run(lambda: self._consumer.start(pull))
        except BaseException:
            if self._reports.owes(request_id, promise):  # a handler raised: who knows whether the loop was asked
                self._loop.run(lambda: self._reports.give_up(request_id, promise, self._consumer.abort))
            raise

    def abort(self, request_id: Hashable) -> None:
        """Give up a pull: it ends as failed, once nothing can write for it any more. Unknown ids are ignored."""
        hash(request_id)  # a mistake is the caller's, not the data thread's
        self._loop.run(lambda: self._consumer.abort(request_id))

    def hold(self, request_id: Hashable, reference: AnyReference, *, for_s: float = _HOLD_S) -> None:
        """Keep the producer's lease alive until the request is pulled, declined or aborted, at most for ``for_s``.

        Nothing is reported, also if the producer cannot be reached.

        Raises:
            MessageError, ConfigError: the reference or the time is malformed.
        """
        hash(request_id)
        known, limit_s = PullReference.of(reference), time_span("for_s", for_s)
        self._loop.run(lambda: self._consumer.hold(request_id, known, limit_s))

    def decline(self, reference: AnyReference) -> None:
        """Tell the producer that this rank will not read; nothing is reported. MessageError: a malformed reference."""
        known = PullReference.of(reference)
        self._loop.run(lambda: self._consumer.decline(known))

    # What happened

    @property
    def ended(self) -> int:
        """How many events ``poll`` would return: cheaper to ask in every step than to poll."""
        return len(self._reports)

    def poll(self) -> list[Event]:
        """Return what has ended since the last call: pulls and publications, each once."""
        return self._reports.poll()

    def fileno(self) -> int:
        """Give a descriptor that is readable when ``poll`` may have something."""
        return self._reports.fileno()

    def wait(self, timeout_s: float) -> list[Event]:
        """Poll, waiting for something to return for at most ``timeout_s`` seconds."""
        return self._reports.wait(time_span("timeout_s", timeout_s))

    def stats(self) -> dict[str, int]:
        """Give counts since the start, and the sizes of everything that is empty when nothing goes on."""
        sizes = asdict(self._consumer.counts()) | self._producer.counts() | {"connecting": self._peers.connecting}
        return {**asdict(self._stats), **sizes, "peers": len(self._peers.ready())}

    def describe(self) -> str:
        """Describe the engine and its peers for people."""
        head = (
            f"engine {self.identity.engine_id} rank {tuple(self.identity.rank)} at {self.endpoint}, "
            f"{len(self.layout.layers)} layers in {len(self.layout.regions)} regions, kvrdma {__version__}"
        )
        refused = self.refused | self._memory.refused
        return "\n".join([head, *transport_lines(self._memory.transports, refused, self._peers.ready())])

    # Life

    def close(self) -> None:
        """Revoke every lease, fail every pull, stop. Takes at most some seconds whatever peers do. Idempotent.

        What ends by it can still be polled. In a forked child it does nothing.

        Raises:
            BaseException: the defect by which the side channel ended, if it did.
        """
        if not self._lock.is_ours:
            return
        with self._lock.held():
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        atexit.unregister(self.close)
        self._producer.close(self._fence)
        self._threads.close()
        for transport in self._opened:
            transport.close()
        self._report_the_rest()
        for background in (self._handshakes, self._work):
            background.close(timeout_s=0.1)
        self._close_channels()

    def _close_channels(self) -> None:
        try:
            self._server.close()
        finally:
            if self._outbox is not None:
                self._outbox.close()

    def __enter__(self) -> Self:
        """Use as a context manager: closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportClosedError(f"engine {self.identity.engine_id} is closed")
        if self._threads.defect is not None:
            raise PullError(f"engine {self.identity.engine_id} was ended by a defect: {self._threads.defect!r}")

    def _report_the_rest(self) -> None:
        """Report pulls that never got to the data thread, or were lost by its defect."""
        self._reports.close()
        why = "closed" if self._threads.defect is None else f"ended by a defect: {self._threads.defect!r}"
        self._reports.fail_the_rest(PullAbortedError(f"engine {self.identity.engine_id} was {why}"))
