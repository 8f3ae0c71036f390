"""The consumer side: a thread that takes pulls from the handshake to the done message, whatever the caller does."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import numpy as np

from kvrdma import handshake
from kvrdma.engine.digest import compare_digests
from kvrdma.engine.events import PullDone, PullFailed, PullReleased
from kvrdma.engine.links import PeerEngine
from kvrdma.engine.pull import Pull, ReadKey, Wanted
from kvrdma.errors import (
    KVRDMAError,
    LeaseRevokedError,
    PeerUnavailableError,
    PlanError,
    PullAbortedError,
    PullError,
    PullTimeoutError,
    ReadCancelledError,
    TransportError,
)
from kvrdma.lease import WORD_NBYTES, Verdict, judge
from kvrdma.plan import BlockSpan
from kvrdma.transport import PeerLost, ReadDone, Transport
from kvrdma.wire import Goodbye, Heartbeat, LeaseDone

if TYPE_CHECKING:
    from kvrdma.engine.core import Parts
    from kvrdma.reference import PullReference
    from kvrdma.sidechannel import Endpoint
    from kvrdma.transport import Completion

_MAX_ATTEMPTS = 2
_QUARANTINE_AFTER_S = 5.0
_FIRST_LOOK_AGAIN_S = 0.0005
_HOUSEKEEPING_S = 1.0
_log = logging.getLogger(__name__)


class Consumer:
    """All pulls of one rank. Everything here runs in the engine's data thread unless it says otherwise."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._peers = parts.peers
        self._pulls: dict[Hashable, Pull] = {}
        self._reads: dict[ReadKey, Pull] = {}
        self._held: dict[Hashable, PullReference] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._landing = list(range(len(parts.fence) + parts.spare_words - 1, len(parts.fence) - 1, -1))
        self._last_beat: dict[Hashable, float] = {}
        self.after(_HOUSEKEEPING_S, self._housekeeping)

    # What the engine asks for

    def start(self, wanted: Wanted) -> None:
        """Take up a pull."""
        self._held.pop(wanted.request_id, None)
        pull = self._pulls[wanted.request_id] = Pull(wanted)
        self._parts.stats.pulls_started += 1
        self.after(wanted.deadline_s - self._now(), lambda: self._time_out(pull))
        self._try(pull)

    def abort(self, request_id: Hashable) -> None:
        """Give a pull up; it ends as failed once nothing can write for it any more."""
        self._held.pop(request_id, None)
        pull = self._pulls.get(request_id)
        if pull is not None:
            self._fail(pull, PullAbortedError(f"pull {request_id!r} was aborted"), retryable=False)

    def hold(self, request_id: Hashable, reference: PullReference) -> None:
        """Keep a lease alive until the request is pulled, declined or aborted."""
        self._held[request_id] = reference
        self._peers.find(reference, lambda _: None)

    def decline(self, reference: PullReference) -> None:
        """Tell the producer that this rank will not read."""

        def tell(peer: PeerEngine | KVRDMAError) -> None:
            if isinstance(peer, PeerEngine):
                self._tell_done(peer, reference, succeeded=False)

        self._held = {key: held for key, held in self._held.items() if held.lease != reference.lease}
        self._peers.find(reference, tell)

    @property
    def counts(self) -> dict[str, int]:
        """Sizes of everything that must be empty when nothing is going on."""
        return {
            "pulls": len(self._pulls),
            "reads": len(self._reads),
            "held": len(self._held),
            "landing": self._parts.spare_words - len(self._landing),
        }

    # Timers

    def after(self, seconds: float, run: Callable[[], None]) -> None:
        """Run something in the data thread, not before ``seconds`` from now."""
        heapq.heappush(self._timers, (self._now() + seconds, next(self._order), run))

    def run_timers(self) -> float:
        """Run what is due; returns the seconds until the next is."""
        now_s = self._now()
        while self._timers and self._timers[0][0] <= now_s:
            heapq.heappop(self._timers)[2]()
        return max(0.0, self._timers[0][0] - self._now()) if self._timers else _HOUSEKEEPING_S

    def _now(self) -> float:
        return self._parts.clock()

    def _housekeeping(self) -> None:
        self._beat()
        in_use = {id(pull.peer) for pull in self._pulls.values()}
        self._peers.drop_idle(self._parts.home.config.peer_idle_s, lambda peer: id(peer) in in_use)
        self.after(_HOUSEKEEPING_S, self._housekeeping)

    def _beat(self) -> None:
        """Renew the leases of everything not finished, at a third of their length."""
        due: dict[Endpoint, list[tuple[int, int]]] = {}
        now_s = self._now()
        waiting = {**self._held, **{key: pull.wanted.reference for key, pull in self._pulls.items()}}
        self._last_beat = {key: at for key, at in self._last_beat.items() if key in waiting}
        for key, reference in waiting.items():
            if now_s - self._last_beat.get(key, float("-inf")) < reference.lease_s / 3:
                continue
            peer = self._peers.known(reference)
            if peer is not None:
                self._last_beat[key] = now_s
                for reader in peer.tell:
                    due.setdefault(reader.mailbox, []).append((reference.lease.slot, reference.lease.generation))
        for mailbox, leases in due.items():
            self._parts.outbox.send(mailbox, Heartbeat(tuple(leases)), keep_trying_s=5.0)

    # One attempt

    def _try(self, pull: Pull) -> None:
        pull.attempts += 1
        self._peers.find(pull.wanted.reference, lambda found: self._connected(pull, found))

    def _connected(self, pull: Pull, found: PeerEngine | KVRDMAError) -> None:
        if self._pulls.get(pull.wanted.request_id) is not pull or pull.peer is not None:
            return
        if isinstance(found, KVRDMAError):
            retryable = not isinstance(found, PeerUnavailableError) and isinstance(found, TransportError)
            self._fail(pull, found, retryable=retryable)
            return
        pull.peer = found
        try:
            pull.plan = found.planner.plan(pull.wanted.blocks, self._spans(pull.wanted.reference), pull.wanted.tokens)
        except PlanError as error:
            self._fail(pull, error, retryable=False)
            return
        self._post(pull)

    @staticmethod
    def _spans(reference: PullReference) -> list[BlockSpan]:
        pairs = zip(reference.blocks, reference.first_blocks, strict=True)
        return [BlockSpan(np.asarray(ids, np.int64), first) for ids, first in pairs]

    def _post(self, pull: Pull) -> None:
        assert pull.peer
        assert pull.plan
        pull.posted_s = self._now()
        pull.rows_posted = 0
        for index, (link, source) in enumerate(zip(pull.peer.links, pull.plan.sources, strict=True)):
            if len(source.rows) == 0:
                continue
            try:
                read = link.transport.read(link.peer, source.rows)
            except TransportError as error:
                self._fail_attempt(pull, error)
                return
            key = ReadKey(link.transport.name, read)
            pull.data[key] = index
            pull.unfenced.add(index)
            self._reads[key] = pull
        self._advance(pull)

    # Completions

    def take(self, transport: Transport, completion: Completion) -> None:
        """Follow up on what a transport has reported."""
        if isinstance(completion, PeerLost):
            self._peers.lose(transport.name, completion.peer)
            return
        key = ReadKey(transport.name, completion.read)
        pull = self._reads.pop(key, None)
        if pull is None:
            return
        data, word = pull.data.pop(key, None), pull.words.pop(key, None)
        if not isinstance(completion, ReadDone):
            self._fail_attempt(pull, completion.reason)
        elif data is not None:
            pull.rows_posted += completion.rows_posted
            self._landed(pull, data)
        elif word is not None:
            self._judge(pull, word)
        self._advance(pull)

    def _landed(self, pull: Pull, index: int) -> None:
        if pull.reason:
            return
        if self._parts.home.config.verify == "digest":
            if not pull.data:
                self._compare(pull)
        else:
            self._read_word(pull, index)

    def _compare(self, pull: Pull) -> None:
        """Compare checksums in a thread of its own, then go on to the fence."""

        def then(error: KVRDMAError | None) -> None:
            pull.checking = False
            if error is not None:
                self._fail_attempt(pull, error)
            else:
                for index in list(pull.unfenced):
                    self._read_word(pull, index)
            self._advance(pull)

        pull.checking = True
        compare_digests(self._parts.home.config, pull, lambda error: self._parts.run(lambda: then(error)))

    def _read_word(self, pull: Pull, index: int) -> None:
        """Read the lease's word from a source whose data has arrived."""
        if pull.reason or pull.peer is None:
            return
        if index not in pull.landing:
            if not self._landing:
                self._fail(
                    pull, PullError("too many pulls at the same time: no word left for the fence"), retryable=False
                )
                return
            pull.landing[index] = self._landing.pop()
        link = pull.peer.links[index]
        local = self._parts.fence.addr + WORD_NBYTES * pull.landing[index]
        offset = WORD_NBYTES * pull.wanted.reference.lease.slot
        row = np.array([[local, link.fence_region, offset, WORD_NBYTES]], np.uint64)
        try:
            key = ReadKey(link.transport.name, link.transport.read(link.peer, row))
        except TransportError as error:
            self._fail_attempt(pull, error)
            return
        pull.words[key] = index
        self._reads[key] = pull

    def _judge(self, pull: Pull, index: int, delay_s: float = _FIRST_LOOK_AGAIN_S) -> None:
        lease = pull.wanted.reference.lease
        verdict = judge(self._parts.fence.word(pull.landing[index]), lease)
        if verdict is Verdict.LIVE:
            pull.unfenced.discard(index)
        elif verdict is Verdict.REVOKED:
            self._parts.stats.fence_rejections += 1
            self._fail(pull, LeaseRevokedError(self._late(pull)), retryable=False)
        else:
            attempt = pull.attempts
            self.after(delay_s, lambda: self._look_again(pull, index, attempt))

    def _look_again(self, pull: Pull, index: int, attempt: int) -> None:
        if index in pull.unfenced and pull.attempts == attempt:
            self._read_word(pull, index)
            self._advance(pull)

    def _late(self, pull: Pull) -> str:
        reference = pull.wanted.reference
        return (
            f"pull {pull.wanted.request_id!r} of {reference.request_id!r} from engine {reference.engine_id}: the lease "
            f"ended before the data had arrived, {self._now() - pull.wanted.started_s:.3f} s after the pull began"
        )

    def _advance(self, pull: Pull) -> None:
        """Do what the state of a pull allows; called after each change."""
        if self._pulls.get(pull.wanted.request_id) is not pull:
            return
        if pull.reason is not None:
            if not pull.in_flight:
                self._settle(pull)
            return
        if pull.plan and not pull.data and not pull.checking and not pull.shaped:
            self._parts.shaper.finish(pull.plan)  # while the words of the fence are on their way
            pull.shaped = True
        if pull.complete:
            self._complete(pull)

    # Ends

    def _fail_attempt(self, pull: Pull, error: KVRDMAError) -> None:
        """An attempt failed by its transport: the connection is dropped, a fresh one may do better."""
        if pull.peer is not None:
            if pull.reason is None and not isinstance(error, ReadCancelledError):
                self._peers.breaker(pull.wanted.reference).record_failure()
            self._peers.drop(pull.peer)
        self._fail(pull, error, retryable=True)

    def _fail(self, pull: Pull, reason: KVRDMAError, *, retryable: bool) -> None:
        pull.fail(reason, retryable=retryable)
        self._advance(pull)

    def _time_out(self, pull: Pull) -> None:
        if self._pulls.get(pull.wanted.request_id) is not pull:
            return
        seconds = self._now() - pull.wanted.started_s
        reason = PullTimeoutError(f"pull {pull.wanted.request_id!r} did not end within {seconds:.3f} s")
        if pull.in_flight and pull.peer is not None:
            self.after(_QUARANTINE_AFTER_S, lambda: self._quarantine(pull))
            pull.fail(reason, retryable=False)
            self._peers.drop(pull.peer)  # ends its reads; other pulls of the peer are tried again
        self._fail(pull, reason, retryable=False)

    def _quarantine(self, pull: Pull) -> None:
        if self._pulls.get(pull.wanted.request_id) is pull and not pull.quarantined:
            pull.quarantined = True
            self._parts.stats.quarantined += 1
            self._report_failure(pull)

    def _settle(self, pull: Pull) -> None:
        """A pull with a reason to fail has nothing in flight any more."""
        self._landing.extend(pull.landing.values())
        pull.landing.clear()
        if pull.retryable and pull.attempts < _MAX_ATTEMPTS and self._now() < pull.wanted.deadline_s:
            _log.info("pull %r is tried again: %s", pull.wanted.request_id, pull.reason)
            self._parts.stats.pulls_retried += 1
            pull.reset()
            self._try(pull)
            return
        del self._pulls[pull.wanted.request_id]
        if pull.quarantined:
            self._parts.stats.quarantined -= 1
            self._parts.report(PullReleased(pull.wanted.request_id))
        else:
            self._report_failure(pull)

    def _report_failure(self, pull: Pull) -> None:
        assert pull.reason
        self._parts.stats.pulls_failed += 1
        wanted = pull.wanted
        self._parts.report(PullFailed(wanted.request_id, pull.reason, pull.attempts, quarantined=pull.quarantined))
        peer = pull.peer or self._peers.known(wanted.reference)
        if peer is not None:
            self._tell_done(peer, wanted.reference, succeeded=False)

    def _complete(self, pull: Pull) -> None:
        assert pull.peer
        assert pull.plan
        wanted, now_s = pull.wanted, self._now()
        del self._pulls[wanted.request_id]
        self._landing.extend(pull.landing.values())
        self._peers.breaker(wanted.reference).record_success()
        self._parts.stats.pulls_done += 1
        self._parts.stats.pulled_bytes += pull.plan.nbytes
        self._parts.stats.rows_posted += pull.rows_posted
        done = PullDone(
            request_id=wanted.request_id,
            nbytes=pull.plan.nbytes,
            rows=sum(source.rows_before for source in pull.plan.sources),
            rows_posted=pull.rows_posted,
            elapsed_s=now_s - wanted.started_s,
            read_s=now_s - pull.posted_s,
            attempts=pull.attempts,
            via=tuple(link.via for link in pull.peer.links),
        )
        self._tell_done(pull.peer, wanted.reference, succeeded=True)
        self._parts.report(done)

    def _tell_done(self, peer: PeerEngine, reference: PullReference, *, succeeded: bool) -> None:
        identity = self._parts.home.identity
        rank = handshake.flat_rank(identity.shape, identity.rank)
        lease = (reference.lease.slot, reference.lease.generation)
        for reader in peer.tell:
            message = LeaseDone(lease, identity.engine_id, rank, reader.readers, succeeded)
            self._parts.outbox.send(reader.mailbox, message, keep_trying_s=reference.lease_s)

    def close(self) -> None:
        """Fail every pull, say goodbye to every peer, disconnect."""
        identity = self._parts.home.identity
        goodbye = Goodbye(identity.engine_id, handshake.flat_rank(identity.shape, identity.rank))
        for mailbox in {reader.mailbox for peer in self._peers.ready() for reader in peer.tell}:
            self._parts.outbox.send(mailbox, goodbye, keep_trying_s=1.0)
        for pull in list(self._pulls.values()):
            self._fail(
                pull, PullAbortedError(f"pull {pull.wanted.request_id!r}: the engine was closed"), retryable=False
            )
