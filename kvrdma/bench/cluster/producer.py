"""The producer's part: publishes requests, window by window, and does to them what the scenario says."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvrdma.bench.cluster.exchange import wait_count
from kvrdma.bench.cluster.rank import Member
from kvrdma.engine import Ended, Event
from kvrdma.errors import LeaseError, UnreachableError
from kvrdma.reference import PullReference

_OTHER_REQUEST = 1 << 18
"""Added to a request's number for the bytes that overwrite it."""


class ProducerRank:
    """Publishes the requests of its engine in order, on this rank.

    Request ``n`` of an engine lies in slot ``n % slots``; it is published when the one before it in that slot has ended
    on all ranks.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        scenario = member.scenario
        self._lengths, self._fates = scenario.lengths(), scenario.fates()
        engines = scenario.producer.engines
        self.requests = [r for r in range(scenario.requests) if r % engines == member.place.engine]
        self._slots = member.cache.blocks // member.cache.slot_blocks
        self._live: dict[int, int] = {}
        self.ended: dict[str, int] = {}
        restarts = scenario.failures.restart and member.place.engine == 0 and len(self.requests) > 1
        self._restart_at = len(self.requests) // 2 if restarts else -1
        self._leases = 0

    def run(self) -> None:
        """Publish everything and wait until it has ended.

        Raises:
            UnreachableError: another rank does not go on.
        """
        for index, request in enumerate(self.requests):
            if index == self._restart_at:
                self._restart(self.requests[index - 1])
            if index >= self._slots:
                self._await_end(self.requests[index - self._slots])
            self._publish(request, index % self._slots)
            if self._fates[request] == "withdraw":
                self._withdraw(request, index % self._slots)
        for request in self.requests[-self._slots :]:
            self._await_end(request)

    def _publish(self, request: int, slot: int) -> None:
        member, tokens = self._member, self._lengths[request]
        blocks = member.cache.slot(slot, tokens)
        member.cache.write(request, blocks, tokens)
        key = f"reference/{request}"
        lease = None
        if member.place.index:
            lease = PullReference.from_params(member.exchange.get(key, member.timeout_s)).lease
        try:
            reference = member.engine.publish(request, blocks, tokens, lease=lease)
        except LeaseError:
            if not member.place.index:
                raise
            return  # the engine was restarted under it
        self._live[request] = slot
        if not member.place.index:
            member.exchange.put(key, reference.to_params())

    def _withdraw(self, request: int, slot: int) -> None:
        """Take it back once a consumer reads it, and use its blocks for something else at once."""
        member, tokens = self._member, self._lengths[request]
        wait_count(member.exchange, f"started/{request}", 1, member.timeout_s)
        member.engine.withdraw(request)
        member.cache.write(request + _OTHER_REQUEST, member.cache.slot(slot, tokens), tokens)

    def _await_end(self, request: int) -> None:
        """Wait until a publication has ended here and on the other ranks."""
        member = self._member
        deadline_s = time.monotonic() + member.timeout_s + member.config.lease_s
        while request in self._live:
            if time.monotonic() > deadline_s:
                raise UnreachableError(
                    f"request {request} did not end on {member.place.engine_id} {member.place.rank} within "
                    f"{member.timeout_s + member.config.lease_s:g} s: a consumer is silent, see its log"
                )
            self._note(member.engine.wait(1.0))
        wait_count(member.exchange, f"ended/{request}", self._ranks, member.timeout_s + member.config.lease_s)

    @property
    def _ranks(self) -> int:
        return self._member.scenario.producer.ranks

    def _note(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Ended) and isinstance(event.request_id, int):
                self._end(event.request_id, event.how.name.lower())

    def _end(self, request: int, how: str) -> None:
        if self._live.pop(request, None) is not None:
            self.ended[how] = self.ended.get(how, 0) + 1
            self._member.exchange.add(f"ended/{request}")

    def _restart(self, before: int) -> None:
        """Once the request before has begun to be read: close without a word, open anew."""
        member = self._member
        wait_count(member.exchange, f"started/{before}", 1, member.timeout_s)
        member.reopen(1)
        for request in list(self._live):
            self._end(request, "restarted")
        # A consumer that comes before all ranks are back is turned away, and nobody tells the ranks that are.
        back = f"back/{member.place.engine_id}"
        member.exchange.add(back)
        wait_count(member.exchange, back, self._ranks, member.timeout_s)
