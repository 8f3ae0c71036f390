"""The consumer's part: pulls requests as they arrive, checks every byte, and notes every time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvrdma.bench.cluster.rank import Member
from kvrdma.engine import Event, PullDone, PullFailed, PullReleased
from kvrdma.errors import KVRDMAError, UnreachableError
from kvrdma.reference import PullReference

_DEAD_PORT = 9  # discard: nobody listens there
_GRACE_S = 30.0
_LOOK_S = 0.2


@dataclass(slots=True)
class Outcome:
    """How one request ended on one rank. Times in seconds, on this rank's clock from the common start."""

    request: int
    fate: str
    result: str
    """``"done"``, or the class of the error."""
    due_s: float
    began_s: float
    ended_s: float
    nbytes: int = 0
    rows: int = 0
    rows_posted: int = 0
    attempts: int = 0
    plan_s: float = 0.0
    post_s: float = 0.0
    wait_s: float = 0.0
    """From the first post to the last byte, without the posting itself."""
    reshape_s: float = 0.0
    wrong_rows: int = 0
    why: str = ""


@dataclass(slots=True)
class _Flight:
    slot: int
    blocks: list[int]
    reference: PullReference
    due_s: float
    began_s: float


@dataclass(slots=True)
class ConsumerRank:
    """Pulls the requests of its engine into this rank."""

    member: Member
    outcomes: list[Outcome] = field(default_factory=list)
    _flying: dict[int, _Flight] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _start_s: float = 0.0

    def requests(self) -> list[int]:
        """List the requests that this rank's engine serves."""
        scenario = self.member.scenario
        producers, consumers = scenario.producer.engines, scenario.consumer.engines
        return [r for r in range(scenario.requests) if (r + r // producers) % consumers == self.member.place.engine]

    def run(self) -> None:
        """Pull everything; returns when the last request has ended.

        Raises:
            UnreachableError: a producer does not publish, or a pull does not end in time.
        """
        scenario = self.member.scenario
        lengths, fates, due_s = scenario.lengths(), scenario.fates(), scenario.arrivals_s()
        self._free = list(range(scenario.arrival.concurrency))
        self._start_s = time.monotonic()
        for request in self.requests():
            self._wait_until(due_s[request])
            reference = self._reference(request)
            self._begin(request, reference, lengths[request], fates[request], due_s[request])
        while self._flying:
            self._collect(1.0)

    def _reference(self, request: int) -> PullReference:
        """Wait for a request's publication, and go on with what ends meanwhile: its producer may wait for that."""
        deadline_s = time.monotonic() + self.member.timeout_s
        while True:
            try:
                return PullReference.from_params(self.member.exchange.get(f"reference/{request}", _LOOK_S))
            except UnreachableError:
                if time.monotonic() > deadline_s:
                    raise
                self._collect(0.0)

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _wait_until(self, due_s: float) -> None:
        """Wait for the time of a request, and for room for it."""
        while not self._free:
            self._collect(1.0)
        while (left_s := due_s - self._now_s()) > 0:
            self._collect(left_s)

    def _begin(self, request: int, reference: PullReference, tokens: int, fate: str, due_s: float) -> None:
        engine, cache = self.member.engine, self.member.cache
        slot = self._free.pop()
        blocks = cache.slot(slot, tokens)
        if self.member.scenario.verify:
            cache.poison(blocks)
        params = reference.to_params()
        if fate == "unreachable":
            params = {**params, "remote_port": _DEAD_PORT, "remote_engine_id": f"{reference.engine_id} gone"}
        self._flying[request] = _Flight(slot, blocks, reference, due_s, self._now_s())
        engine.pull(request, params, blocks)
        self.member.exchange.add(f"started/{request}")
        if fate == "abort":
            engine.abort(request)
        elif fate == "unreachable":
            engine.decline(reference)

    def _collect(self, timeout_s: float) -> None:
        for event in self.member.engine.wait(min(1.0, timeout_s)):
            self._note(event)
        limit_s = self.member.scenario.timeout_s + _GRACE_S
        late = [r for r, flight in self._flying.items() if self._now_s() - flight.began_s > limit_s]
        if late:
            raise UnreachableError(f"requests {late} did not end within {limit_s:g} s: {self.member.engine.stats()}")

    def _note(self, event: Event) -> None:
        request = event.request_id
        if not isinstance(request, int) or request not in self._flying:
            return
        flight, now_s = self._flying[request], self._now_s()
        if isinstance(event, PullFailed) and event.quarantined:
            return  # its blocks may still be written to: PullReleased follows
        fate, tokens = self.member.scenario.fates()[request], self.member.scenario.lengths()[request]
        outcome = Outcome(request, fate, "done", flight.due_s, flight.began_s, now_s)
        if isinstance(event, PullDone):
            self._fill(outcome, event)
            if self.member.scenario.verify:
                outcome.wrong_rows = self.member.cache.wrong_rows(request, flight.blocks, tokens)
        elif isinstance(event, PullFailed):
            outcome.result, outcome.why, outcome.attempts = _name(event.reason), str(event.reason), event.attempts
            self.member.engine.decline(flight.reference)  # where the pull met nobody, the producer does not know
        elif isinstance(event, PullReleased):
            outcome.result = "PullTimeoutError"
        self.outcomes.append(outcome)
        del self._flying[request]
        self._free.append(flight.slot)

    @staticmethod
    def _fill(outcome: Outcome, done: PullDone) -> None:
        outcome.ended_s = outcome.began_s + done.elapsed_s  # this thread may have been checking bytes meanwhile
        outcome.nbytes, outcome.rows, outcome.rows_posted = done.nbytes, done.rows, done.rows_posted
        outcome.attempts, outcome.plan_s, outcome.post_s = done.attempts, done.plan_s, done.post_s
        outcome.wait_s, outcome.reshape_s = max(0.0, done.data_s - done.post_s), done.reshape_s


def _name(error: KVRDMAError) -> str:
    return type(error).__name__


def unexpected(outcome: Outcome, *, restart: bool) -> bool:
    """Tell whether an outcome is neither right nor what the scenario provoked."""
    if outcome.wrong_rows:
        return True
    allowed = {
        "": {"done"},
        "withdraw": {"done", "LeaseRevokedError"},
        "abort": {"done", "PullAbortedError"},
        "unreachable": {"UnreachableError", "PullTimeoutError", "PeerUnavailableError", "TopologyError"},
    }[outcome.fate]
    return outcome.result not in allowed and not restart
