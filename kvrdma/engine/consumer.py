"""The consumer side: takes pulls from the handshake to the done message, whatever the caller does.

Every step of a pull may raise; ``_guard`` turns that into its failure: no other pull may suffer from what it met.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVarTuple

from kvrdma.engine.digest import compare_digests
from kvrdma.engine.events import PullDone, PullFailed, PullReleased
from kvrdma.engine.holding import Holding
from kvrdma.engine.links import PeerEngine
from kvrdma.engine.parts import Parts
from kvrdma.engine.pull import LAST_LOOK_AGAIN_S, Pull, ReadKey, Wanted
from kvrdma.engine.reading import Reading
from kvrdma.errors import (
    ConfigError,
    KVRDMAError,
    LeaseRevokedError,
    PullAbortedError,
    PullError,
    PullTimeoutError,
    ReadCancelledError,
    RowsError,
    TransportError,
)
from kvrdma.plan import BlockSpan, ReadPlan
from kvrdma.reference import PullReference
from kvrdma.transport import Completion, PeerLost, ReadDone, Transport

_MAX_STRIKES = 2
_MAX_ATTEMPTS = 10
_QUARANTINE_AFTER_S = 5.0
_log = logging.getLogger(__name__)

Given = TypeVarTuple("Given")


@dataclass(frozen=True, slots=True)
class Counts:
    """Sizes of everything that is empty when nothing is going on."""

    pulls: int
    reads: int
    held: int
    landing: int
    renewed: int
    timers: int


class Consumer:
    """All pulls of one rank. Everything here runs in the data thread."""

    def __init__(self, parts: Parts) -> None:
        """Pull nothing yet."""
        self._parts = parts
        self._loop = parts.loop
        self._peers = parts.peers
        self._reading = Reading(parts.fence, parts.loop)
        self._holding = Holding(parts.loop, parts.peers, parts.tenant)
        self._pulls: dict[Hashable, Pull] = {}
        self._fenced = parts.config.verify != "digest"
        """Words come with the data, not after the checksums."""
        self._closed = False

    # What the engine asks for

    def start(self, wanted: Wanted) -> None:
        """Take up a pull."""
        self._holding.release(wanted.request_id)
        pull = self._pulls[wanted.request_id] = Pull(wanted)
        self._parts.stats.pulls_started += 1
        self._try(pull)
        if not pull.over:  # its reads do not wait for it
            left_s = wanted.deadline_s - self._loop.now()
            pull.timers["deadline"] = self._loop.after(left_s, lambda: self._time_out(pull))

    def abort(self, request_id: Hashable) -> bool:
        """Give a pull up; it ends as failed once nothing can write for it any more. False if it has, or never was."""
        self._holding.release(request_id)
        pull = self._pulls.get(request_id)
        if pull is not None:
            self._fail(pull, PullAbortedError(f"pull {request_id!r} was aborted"))
            self._advance(pull)
        return request_id in self._pulls

    def hold(self, request_id: Hashable, reference: PullReference, for_s: float) -> None:
        """Keep a lease alive until the request is pulled, declined or aborted, or the time is over."""
        if request_id not in self._pulls:
            self._holding.hold(request_id, reference, for_s)

    def decline(self, reference: PullReference) -> None:
        """Tell the producer that this rank will not read."""

        def tell(peer: PeerEngine | KVRDMAError) -> None:
            if isinstance(peer, PeerEngine):
                self._parts.tenant.tell_done(peer, reference, succeeded=False)

        self._holding.release_lease(reference.lease)
        self._peers.find(reference, tell)

    def counts(self) -> Counts:
        """Give the sizes of everything that is empty when nothing is going on."""
        return Counts(
            pulls=len(self._pulls),
            reads=len(self._reading.reads),
            held=len(self._holding),
            landing=self._reading.landing,
            renewed=len(self._parts.tenant),
            timers=self._loop.timers,
        )

    def drop_idle_peers(self) -> None:
        """Disconnect peers that nothing has used for long."""
        in_use = {id(pull.peer) for pull in self._pulls.values()}
        self._peers.drop_idle(self._parts.config.peer_idle_s, lambda peer: id(peer) in in_use)

    # One attempt

    def _guard(self, pull: Pull, step: Callable[[*Given], None], *given: *Given) -> None:
        """Run a step of a pull; what it raises is the pull's failure. Then do what follows from its state."""
        try:
            step(*given)
        except KVRDMAError as error:
            self._fail(pull, error)
        except Exception as error:  # noqa: BLE001 - a defect that one pull meets must not end all others
            _log.exception("pull %r met a defect", pull.wanted.request_id)
            self._fail(pull, PullError(f"pull {pull.wanted.request_id!r} met a defect: {error!r}"))
        self._advance(pull)

    def _try(self, pull: Pull) -> None:
        pull.attempts += 1
        attempt = pull.attempts

        def found(peer: PeerEngine | KVRDMAError) -> None:
            if not pull.over and pull.attempts == attempt and pull.reason is None:
                self._guard(pull, self._begin, pull, peer)

        self._peers.find(pull.wanted.reference, found)

    def _begin(self, pull: Pull, peer: PeerEngine | KVRDMAError) -> None:
        if not isinstance(peer, PeerEngine):
            raise peer
        reference = pull.wanted.reference
        pull.peer = peer
        pull.posted_s = self._loop.now()
        if not reference.live:
            for index in range(len(peer.links)):
                self._reading.word(pull, index)  # on their way while the plan is made
        pairs = zip(reference.blocks, reference.first_blocks, strict=True)
        spans = [BlockSpan(ids, first) for ids, first in pairs]
        began_s = self._loop.now()
        pull.plan = peer.planner.plan(pull.wanted.blocks, spans, pull.wanted.tokens)
        pull.plan_s = self._loop.now() - began_s
        if reference.live:
            self._reading.data(pull, fenced=self._fenced)
        else:
            pull.unopened = {index for index, source in enumerate(pull.plan.sources) if len(source.batch)}
            pull.posted = not pull.unopened
        self._parts.tenant.keep(pull, reference, peer.tell)  # the reads do not wait for it, or for what is counted
        for source in pull.plan.sources:
            pull.nbytes += source.nbytes
            pull.rows += source.rows_before

    # Completions

    def take(self, transport: Transport, completion: Completion) -> None:
        """Follow up on what a transport has reported."""
        if isinstance(completion, PeerLost):
            self._peers.lose(transport.name, completion.peer)
            return
        key = ReadKey(transport.name, completion.read)
        pull = self._reading.reads.pop(key, None)
        if pull is not None:
            self._guard(pull, self._follow, pull, key, completion)

    def _follow(self, pull: Pull, key: ReadKey, completion: Completion) -> None:
        data, word = pull.data.pop(key, None), pull.words.pop(key, None)
        if not isinstance(completion, ReadDone):
            raise completion.reason
        assert pull.peer
        pull.peer.heard_s = self._loop.now()
        if pull.reason is not None:
            return
        if data is not None:
            pull.rows_posted += completion.rows_posted
            pull.arrived_s = pull.peer.heard_s
            if self._fenced:
                self._reading.judge(pull, data)
            elif not pull.data:
                self._compare(pull)
        elif word is not None and not self._reading.judge(pull, word):
            self._look_again(pull, word)
        elif not pull.posted and pull.plan and not pull.unopened:
            self._reading.data(pull, fenced=self._fenced)

    def _look_again(self, pull: Pull, index: int) -> None:
        attempt = pull.attempts

        def look() -> None:
            if not pull.over and pull.attempts == attempt and pull.reason is None:
                self._guard(pull, self._reading.word, pull, index)

        pull.timers[index] = self._loop.after(pull.look_again_s, look)
        pull.look_again_s = min(2 * pull.look_again_s, LAST_LOOK_AGAIN_S)

    def _compare(self, pull: Pull) -> None:
        """Compare checksums, then go on to the fence."""

        def compare() -> None:
            pull.differs = compare_digests(self._parts.ask, pull)

        def then() -> None:
            for index in sorted(pull.unfenced):
                self._reading.word(pull, index)

        self._work(pull, compare, then)

    def _reshape(self, pull: Pull, plan: ReadPlan) -> None:
        """Reshape what has landed."""

        def finish() -> None:
            began_s = self._loop.now()
            self._parts.finish(plan)
            pull.reshape_s = self._loop.now() - began_s

        self._work(pull, finish, pull.take_shape)

    def _work(self, pull: Pull, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Do something for a pull in another thread, and ``then`` the next step here, if it is still wanted."""

        def next_step(error: BaseException | None) -> None:
            pull.working = False
            if error is not None:
                raise error
            if pull.reason is None:
                then()

        def run() -> None:
            failure: Exception | None = None
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised again in the data thread
                failure = error
            self._loop.run(lambda: self._guard(pull, next_step, failure))

        pull.working = True
        try:
            self._parts.background(run)
        except ConfigError:  # no more threads: late is better than never
            run()

    def _advance(self, pull: Pull) -> None:
        """Do what the state of a pull allows; called after each change."""
        if pull.over:
            return
        if pull.reason is not None:
            if not pull.in_flight:
                self._settle(pull)
            return
        if pull.landed and pull.plan:
            if pull.plan.reshapes:
                self._reshape(pull, pull.plan)
            else:
                pull.shaped = True
        if pull.complete:
            self._complete(pull)

    # Ends

    def _fail(self, pull: Pull, error: KVRDMAError) -> None:
        """An attempt failed. By the connection's fault: a fresh one may do better; otherwise for good."""
        if isinstance(error, LeaseRevokedError):
            self._parts.stats.fence_rejections += 1
        if not isinstance(error, TransportError) or isinstance(error, RowsError):
            pull.fail(error, retryable=False)
            return
        # By us, for another pull's sake: its reads are cancelled, and what it posts afterwards is refused.
        dropped = pull.peer is not None and self._peers.known(pull.wanted.reference) is not pull.peer
        given_up = dropped or isinstance(error, ReadCancelledError)
        if pull.reason is None:
            pull.strikes += not given_up
        if pull.peer is not None:
            self._peers.drop(pull.peer, blame=not given_up)
        pull.fail(error, retryable=True)

    def _time_out(self, pull: Pull) -> None:
        if pull.over:
            return
        pull.fail(self._too_late(pull, pull.state()), retryable=False)
        if pull.in_flight:
            pull.timers["quarantine"] = self._loop.after(_QUARANTINE_AFTER_S, lambda: self._quarantine(pull))
            if pull.peer is not None and pull.peer.heard_s <= pull.asked_s:
                self._peers.drop(pull.peer, blame=True)  # ends its reads; other pulls of the peer are tried again
        self._advance(pull)

    def _too_late(self, pull: Pull, why: str) -> PullTimeoutError:
        seconds = self._loop.now() - pull.wanted.started_s
        return PullTimeoutError(f"pull {pull.wanted.request_id!r} did not end within {seconds:.3f} s: {why}")

    def _quarantine(self, pull: Pull) -> None:
        if not (pull.over or pull.quarantined):
            pull.quarantined = True
            self._parts.stats.quarantined += 1
            self._report_failure(pull)
            if pull.peer is not None:
                self._peers.drop(pull.peer, blame=False)

    def _settle(self, pull: Pull) -> None:
        """A pull with a reason to fail has nothing in flight any more."""
        self._reading.release(pull)
        again = pull.retryable and pull.strikes < _MAX_STRIKES and pull.attempts < _MAX_ATTEMPTS
        if again and self._loop.now() >= pull.wanted.deadline_s:
            pull.fail(self._too_late(pull, str(pull.reason)), retryable=False)
        elif again and not self._closed:
            _log.info("pull %r is tried again: %s", pull.wanted.request_id, pull.reason)
            self._parts.stats.pulls_retried += 1
            pull.reset()
            self._try(pull)
            return
        self._forget(pull)
        if pull.quarantined:
            self._parts.stats.quarantined -= 1
            self._parts.report(PullReleased(pull.wanted.request_id))
        else:
            self._report_failure(pull)

    def _forget(self, pull: Pull) -> None:
        del self._pulls[pull.wanted.request_id]
        pull.over = True
        self._parts.tenant.leave(pull)
        for timer in pull.timers.values():
            timer.cancel()
        pull.timers.clear()

    def _report_failure(self, pull: Pull) -> None:
        assert pull.reason
        self._parts.stats.pulls_failed += 1
        wanted = pull.wanted
        if pull.peer is not None:
            self._parts.tenant.tell_done(pull.peer, wanted.reference, succeeded=False)
        else:
            self._peers.once_known(wanted.reference, lambda peer: self._tell_given_up(peer, wanted.reference))
        self._parts.report(PullFailed(wanted.request_id, pull.reason, pull.attempts, quarantined=pull.quarantined))

    def _tell_given_up(self, peer: PeerEngine, reference: PullReference) -> None:
        """Let the producer have its blocks back, unless another pull has been asked for them meanwhile."""
        mine = (reference.engine_id, reference.lease)
        wanted = (pull.wanted.reference for pull in self._pulls.values())
        if mine not in ((other.engine_id, other.lease) for other in wanted):
            self._parts.tenant.tell_done(peer, reference, succeeded=False)

    def _complete(self, pull: Pull) -> None:
        assert pull.peer
        wanted, now_s = pull.wanted, self._loop.now()
        self._reading.release(pull)
        self._forget(pull)
        self._parts.stats.count_pull(pull.nbytes, pull.rows_posted)
        done = PullDone(
            request_id=wanted.request_id,
            nbytes=pull.nbytes,
            rows=pull.rows,
            rows_posted=pull.rows_posted,
            elapsed_s=now_s - wanted.started_s,
            read_s=now_s - pull.posted_s,
            data_s=max(0.0, pull.arrived_s - pull.posted_s),
            attempts=pull.attempts,
            via=pull.peer.via,
            plan_s=pull.plan_s,
            post_s=pull.post_s,
            reshape_s=pull.reshape_s,
        )
        self._parts.report(done)  # first: somebody may wait for it
        peer = pull.peer

        def tell() -> None:
            self._peers.succeeded(wanted.reference)
            self._parts.tenant.tell_done(peer, wanted.reference, succeeded=True)

        self._loop.afterwards(tell)

    def close(self, defect: BaseException | None = None) -> None:
        """Fail every pull and say goodbye to every peer; those with reads in flight end when these do."""
        why = "was closed" if defect is None else f"was ended by a defect: {defect!r}"
        self._closed = True
        self._holding.close()
        for pull in list(self._pulls.values()):
            self._fail(pull, PullAbortedError(f"pull {pull.wanted.request_id!r}: the engine {why}"))
            self._advance(pull)
        self._parts.tenant.say_goodbye(self._peers.ready())

    def abandon(self) -> None:
        """Report pulls that are still in flight after every transport was closed as quarantined for good."""
        for pull in list(self._pulls.values()):
            self._quarantine(pull)
            self._forget(pull)
