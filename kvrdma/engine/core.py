"""``Engine``: one rank's end of every transfer, as producer and as consumer."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from kvrdma import __version__, handshake
from kvrdma.config import Config
from kvrdma.engine.consumer import Consumer
from kvrdma.engine.events import Event, PullDone, PullFailed, PullReleased, Stats
from kvrdma.engine.links import Home
from kvrdma.engine.peers import Peers
from kvrdma.engine.producer import Producer
from kvrdma.engine.pull import Wanted
from kvrdma.engine.shape import Shaper
from kvrdma.errors import ConfigError, PlanError, PullError, TransportClosedError, TransportError
from kvrdma.handshake import Identity
from kvrdma.layout import KVLayout, TokenShare
from kvrdma.lease import FenceTable, LeaseBook, LeaseKey
from kvrdma.mailbox import Outbox
from kvrdma.memory import RegisteredMemory
from kvrdma.page_format import LayerSpec
from kvrdma.plan import BlockSpan, TokenRange
from kvrdma.reference import PullReference, groups_of
from kvrdma.sidechannel import Endpoint, SideChannelClient, SideChannelServer
from kvrdma.transport import Transport, installed_transports, open_transport
from kvrdma.wire import AnnounceRank, RankDescription

_SPARE_WORDS = 16_384
_CLOSE_S = 5.0
_EXPIRY_S = 0.05
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Parts:
    """What the two sides of an engine share."""

    home: Home
    fence: FenceTable
    spare_words: int
    shaper: Shaper
    outbox: Outbox
    stats: Stats
    clock: Callable[[], float]
    run: Callable[[Callable[[], None]], None]
    report: Callable[[Event], None]
    peers: Peers


class Engine:
    """Publishes blocks of its caches and pulls blocks of other engines into them.

    Its methods return at once and may be called from any thread; what happens is told by ``poll``, each pull and
    each publication exactly once. Everything else runs on the engine's own threads: one moves data, one answers
    peers, one sends small messages.
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
        self.config = config or Config.from_env()
        self.identity = identity
        self.generation = time.time_ns() // 1000
        self.stats_now = Stats()
        self._clock: Callable[[], float] = time.monotonic
        self._events: deque[Event] = deque()
        self._events_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._work: deque[Callable[[], None]] = deque()
        self._work_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for fd in (self._events_fd, self._work_fd):
            weakref.finalize(self, os.close, fd)
        self._pulling: set[Hashable] = set()
        self._defect: BaseException | None = None
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        self._closed = False
        self.refused: dict[str, str] = {}
        shape = identity.shape
        share = TokenShare(shape.dcp_rank(identity.rank.rank), shape.dcp_size, shape.interleave)
        self.layout = KVLayout.from_tensors(caches, specs, share)
        self._fence = FenceTable(self.config.fence_slots, _SPARE_WORDS)
        opened = list(transports) if transports is not None else self._open_transports()
        self._opened = opened
        try:
            self._memory = RegisteredMemory(opened, self.layout, caches, (self._fence.addr, self._fence.nbytes))
            self._start(caches, leader)
        except BaseException:
            for transport in opened:
                transport.close()
            raise

    def _open_transports(self) -> list[Transport]:
        opened: list[Transport] = []
        for name in self.config.transports or sorted(installed_transports()):
            try:
                transport = open_transport(name, require_one_sided=self.config.require_one_sided)
            except TransportError as error:
                if self.config.transports:
                    raise
                self.refused[name] = str(error)
                continue
            if transport.capabilities().reach == "process" and not self.config.transports:
                transport.close()
            else:
                opened.append(transport)
        if not opened:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            raise ConfigError(f"no transport works here: {reasons}")
        return opened

    def _start(self, caches: Mapping[str, Any], leader: Endpoint | None) -> None:
        book = LeaseBook(self._fence, self.config.lease_s)
        self._producer = Producer(book, self.stats_now, self._clock, self._report)
        bind = Endpoint.parse(self.config.bind)
        self._server = SideChannelServer(bind, self._producer.answer, self.config.secret, insecure=self.config.insecure)
        self.endpoint = Endpoint(self.config.advertise or self._server.endpoint.host, self._server.endpoint.port)
        self.side_channel = leader or self.endpoint
        description = self.description()
        self._producer.describe_as(description, self.layout)
        home = Home(self.config, self.identity, self.layout, self._memory.transports)
        self._outbox = Outbox(self.config.secret)
        self._peers = Peers(home, self.stats_now, self._run, self._clock)
        self._consumer = Consumer(
            Parts(
                home=home,
                fence=self._fence,
                spare_words=_SPARE_WORDS,
                shaper=Shaper(self.layout, caches),
                outbox=self._outbox,
                stats=self.stats_now,
                clock=self._clock,
                run=self._run,
                report=self._report,
                peers=self._peers,
            )
        )
        self._thread = threading.Thread(target=self._move_data, name="kvrdma data", daemon=True)
        self._thread.start()
        if leader is not None:
            self.announce(leader)

    def description(self) -> RankDescription:
        """Give what a consumer needs to know of this rank."""
        return RankDescription(
            engine_id=self.identity.engine_id,
            generation=self.generation,
            rank=(self.identity.rank.pp_rank, self.identity.rank.rank),
            host=self.endpoint.host,
            port=self.endpoint.port,
            model=dict(self.identity.model),
            layout=handshake.pack_layout(self.layout),
            offers=self._memory.offers(),
            kvrdma=__version__,
        )

    def announce(self, leader: Endpoint) -> None:
        """Tell the rank that speaks for this engine about this one. Blocks for an answer.

        Raises:
            ControlError: it does not answer, or is of another engine.
        """
        with SideChannelClient(leader, self.config.secret) as client:
            client.request(AnnounceRank(self.description()), self.config.control_timeout_s)

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

        The blocks belong to the readers until ``poll`` says that the publication has ended.

        Args:
            request_id: names it here; may be anything hashable. One live publication each.
            blocks: block ids, or one list of them per KV group.
            num_tokens: how many positions they hold.
            consumers: how many consumer engines will read it, each with all its ranks.
            lease: the lease that another rank of this engine got for the request; ``reference.lease``.
            first_blocks: per group, which block of the sequence the first id is (sliding windows).

        Raises:
            LeaseError: published already, or every lease is taken.
            PlanError: a block id or the number of tokens is out of range.
        """
        self._require_open()
        groups = groups_of(blocks)
        if num_tokens < 0 or any(block < 0 for group in groups for block in group):
            raise PlanError(f"request {request_id!r}: num_tokens {num_tokens} and block ids must not be negative")
        key = self._producer.publish(request_id, consumers, lease)
        shape = self.identity.shape
        return PullReference(
            engine_id=self.identity.engine_id,
            engine_generation=self.generation,
            host=self.side_channel.host,
            port=self.side_channel.port,
            lease=key,
            num_tokens=num_tokens,
            blocks=groups,
            first_blocks=tuple(first_blocks) or (0,) * len(groups),
            request_id=str(request_id)[:4096],
            lease_s=self.config.lease_s,
            tp_size=shape.tp_size,
            dcp_size=shape.dcp_size,
            pp_size=max(1, len(shape.stages)),
            interleave=shape.interleave,
            dcp_across_tp=shape.dcp_across_tp,
        )

    def withdraw(self, request_id: Hashable) -> bool:
        """Take a publication back: late consumers fail. False if it has ended already."""
        return self._producer.withdraw(request_id)

    # Consumer

    def pull(
        self,
        request_id: Hashable,
        reference: PullReference | Mapping[str, Any],
        blocks: Sequence[int] | Sequence[Sequence[int]] | Sequence[BlockSpan],
        *,
        tokens: TokenRange | Sequence[TokenRange] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Fetch a published request into ``blocks``; returns at once.

        The blocks belong to the engine until ``poll`` says that the pull has ended (or, after a quarantine, that
        it was released).

        Args:
            request_id: names it here; one pull at a time each.
            reference: what ``publish`` returned, or its ``to_params()``.
            blocks: ids of the blocks to fill, one list per KV group, or spans that do not start at token 0.
            tokens: positions to read; by default all. Start at the cached prefix, where there is one.
            timeout_s: to its end; the setting ``pull_timeout_s`` by default.

        Raises:
            MessageError: the reference is malformed.
            PlanError: more tokens are asked for than were published.
            PullError: a pull of that id is under way.
        """
        self._require_open()
        if not isinstance(reference, PullReference):
            reference = PullReference.from_params(reference)
        wanted = tokens if tokens is not None else TokenRange(0, reference.num_tokens)
        for span in [wanted] if isinstance(wanted, TokenRange) else wanted:
            if not 0 <= span.start <= span.end <= reference.num_tokens:
                raise PlanError(f"pull {request_id!r}: tokens {span} of {reference.num_tokens} published ones")
        if request_id in self._pulling:
            raise PullError(f"pull {request_id!r} is under way: one at a time")
        now_s = self._clock()
        seconds = self.config.pull_timeout_s if timeout_s is None else timeout_s
        self._pulling.add(request_id)
        pull = Wanted(request_id, reference, _spans(blocks), wanted, now_s, now_s + seconds)
        self._run(lambda: self._consumer.start(pull))

    def abort(self, request_id: Hashable) -> None:
        """Give up a pull: it ends as failed, once nothing can write for it any more. Unknown ids are ignored."""
        self._run(lambda: self._consumer.abort(request_id))

    def hold(self, request_id: Hashable, reference: PullReference) -> None:
        """Keep the producer's lease alive until the request is pulled, declined or aborted."""
        self._run(lambda: self._consumer.hold(request_id, reference))

    def decline(self, reference: PullReference) -> None:
        """Tell the producer that this rank will not read; nothing is reported."""
        self._run(lambda: self._consumer.decline(reference))

    # What happened

    def poll(self) -> list[Event]:
        """Return what has ended since the last call: pulls and publications, each once."""
        self._clear(self._events_fd)  # before looking: what comes later makes it readable again
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def fileno(self) -> int:
        """Give a descriptor that is readable when ``poll`` may have something."""
        return self._events_fd

    def wait(self, timeout_s: float) -> list[Event]:
        """Poll, waiting for something to return for at most ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        while not (events := self.poll()) and (left_s := deadline_s - time.monotonic()) > 0:
            select.select([self._events_fd], [], [], left_s)
        return events

    def stats(self) -> dict[str, int]:
        """Give counts since the start, and the sizes of everything that is empty when nothing goes on."""
        return {**asdict(self.stats_now), **self._consumer.counts, "leases": len(self._producer)}

    def describe(self) -> str:
        """Describe the engine and its peers for people."""
        head = (
            f"engine {self.identity.engine_id} rank {tuple(self.identity.rank)} at {self.endpoint}, "
            f"{len(self.layout.layers)} layers in {len(self.layout.regions)} regions, kvrdma {__version__}"
        )
        lines = [head]
        for name, transport in self._memory.transports.items():
            able = transport.capabilities()
            kind = "one-sided" if able.one_sided else "served by the peer's CPU"
            details = ", ".join(f"{key} {value}" for key, value in able.details.items())
            lines.append(f"  transport {name}: {kind}, reach {able.reach}{', ' + details if details else ''}")
        lines += [
            f"  transport {name}: refused: {why}" for name, why in {**self.refused, **self._memory.refused}.items()
        ]
        lines += [f"  peer {peer.engine_id}: {' | '.join(peer.why)}" for peer in self._peers.ready()]
        return "\n".join(lines)

    # Life

    def close(self) -> None:
        """Revoke every lease, fail every pull, stop. Takes at most some seconds whatever peers do. Idempotent."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._producer.close(self._fence)
        self._closing.set()
        os.eventfd_write(self._work_fd, 1)
        self._thread.join(_CLOSE_S)
        for transport in self._opened:
            transport.close()
        self._server.close()
        self._outbox.close()

    def __enter__(self) -> Self:
        """Use as a context manager: closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportClosedError(f"engine {self.identity.engine_id} is closed")
        if self._defect is not None:
            raise PullError(f"engine {self.identity.engine_id} was ended by a defect: {self._defect!r}")

    def _run(self, work: Callable[[], None]) -> None:
        """Run something in the data thread."""
        self._work.append(work)
        os.eventfd_write(self._work_fd, 1)

    def _report(self, event: Event) -> None:
        if isinstance(event, PullDone | PullReleased) or (isinstance(event, PullFailed) and not event.quarantined):
            self._pulling.discard(event.request_id)
        self._events.append(event)
        os.eventfd_write(self._events_fd, 1)

    @staticmethod
    def _clear(fd: int) -> None:
        try:
            os.eventfd_read(fd)
        except BlockingIOError:
            return

    def _move_data(self) -> None:
        try:
            self._move_data_until_closed()
        except BaseException as error:  # noqa: BLE001 - nobody may wait for a thread that has ended
            self._defect = error
            _log.exception("engine %s is ended by a defect", self.identity.engine_id)
        self._shut_down(list(self._memory.transports.values()))

    def _move_data_until_closed(self) -> None:
        poller = select.poll()
        poller.register(self._work_fd, select.POLLIN)
        transports = list(self._memory.transports.values())
        for transport in transports:
            poller.register(transport.fileno(), select.POLLIN)
        while not self._closing.is_set():
            self._producer.expire()
            poller.poll(1e3 * min(self._consumer.run_timers(), _EXPIRY_S * 2))
            self._clear(self._work_fd)
            while self._work:
                self._work.popleft()()
            for transport in transports:
                for completion in transport.poll():
                    self._consumer.take(transport, completion)

    def _shut_down(self, transports: Sequence[Transport]) -> None:
        self._consumer.close()
        threads = self._peers.close()
        for thread in threads:
            thread.join(0.1)
        for transport in transports:
            transport.close()
            for completion in transport.poll():
                self._consumer.take(transport, completion)


def _spans(blocks: Sequence[int] | Sequence[Sequence[int]] | Sequence[BlockSpan]) -> list[BlockSpan]:
    given = list(blocks)
    if given and all(isinstance(each, BlockSpan) for each in given):
        return [each for each in given if isinstance(each, BlockSpan)]
    return [BlockSpan(ids) for ids in groups_of(given)]  # type: ignore[arg-type]
