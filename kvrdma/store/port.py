"""``StorePort``: one engine's way to its stores: offers blocks of its caches, and fetches blocks into them."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec

from kvrdma.engine import Ended, Engine, PullDone, PullFailed, PullReleased
from kvrdma.engine.arguments import check_apart, check_published, time_span, whole
from kvrdma.errors import KVRDMAError, LeaseError, MessageError, PlanError, PullError
from kvrdma.plan import BlockSpan, TokenRange
from kvrdma.reference import groups_of
from kvrdma.store.clients import StoreClient, Stores
from kvrdma.store.filling import read_reference
from kvrdma.store.geometry import encode_family, family_of, fingerprint, record_nbytes
from kvrdma.store.keys import PrefixKeys, prefix_keys
from kvrdma.wire import Noted, StoreFound, StoreLookup, StoreOffer, StoreOffered, StoreRelease

_RELEASE_S = 0.2
_QUARANTINE_S = 10.0
_MAX_WITHIN_S = 86400.0
"""The longest time a message may name."""

_log = logging.getLogger(__name__)

_Name: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's place in an engine's caches: ``blocks[i]`` is block ``i`` of the sequence, as the engine counts."""

    keys: PrefixKeys
    blocks: Sequence[int]
    start: int = 0
    """How many tokens are in place already and need not be fetched."""


@dataclass(slots=True)
class PortCounts:
    """Counts since the start."""

    prompts_offered: int = 0
    prompts_stored: int = 0
    """Offers after which a store has read, or had everything already."""
    prompts_looked_up: int = 0
    tokens_looked_up: int = 0
    tokens_fetched: int = 0
    fetches_failed: int = 0
    """A store had something, and it did not arrive."""


@dataclass(slots=True)
class _Fetch:
    number: int
    start: int
    tokens: int
    release: tuple[StoreClient, StoreFound] | None


class StorePort:
    """Puts prompts into stores and gets them out. Blocks its caller, each time up to a deadline; for one thread.

    Nothing a store does or fails to do raises: it costs a miss. The port takes all events of its engine.
    """

    def __init__(self, engine: Engine, stores: Stores, block_tokens: int) -> None:
        """Use ``stores`` for the caches of ``engine``.

        Args:
            engine: its identity says which share of the kv heads this is; each rank of its shape has a different one.
            stores: where.
            block_tokens: tokens of a stored block; equal on all engines that share a store. It may differ from the
                engine's own block size.

        Raises:
            LayoutError: the engine's caches cannot be stored by prefix.
            ConfigError: no store has such blocks.
        """
        self._engine = engine
        self._stores = stores
        family = family_of(engine.layout, engine.identity, block_tokens)
        self._family = encode_family(family)
        self.fingerprint = fingerprint(family)
        """Of the caches; part of every key."""
        self.block_tokens = family.block_tokens
        self.record_nbytes = record_nbytes(family)
        """Bytes of a stored block: all layers and ranks."""
        self._own_block = min(engine.layout.block_size(layer) for layer in engine.layout.layers)
        self.counts = PortCounts()
        self._numbers = itertools.count(1)
        self._open: set[Hashable] = set()
        """Publications that stores read."""
        self._pulls: dict[Hashable, PullDone | PullFailed | PullReleased] = {}
        """How pulls have ended, until it is looked at."""
        self._fetching: set[_Name] = set()
        """Pulls that have not been looked at."""

    def keys(self, tokens: Sequence[int], salt: bytes = b"") -> PrefixKeys:
        """Make the keys of a prompt; ``salt``: what else its KV depends on (an adapter, images, a tenant)."""
        return prefix_keys(self.fingerprint, tokens, self.block_tokens, salt)

    # Into the stores

    def put(self, prompts: Sequence[Prompt], timeout_s: float) -> list[bool]:
        """Let the stores read prompts; their blocks are the caller's again on return.

        Args:
            prompts: complete in the engine's caches.
            timeout_s: for all of them together; after that the blocks are taken back.

        Returns:
            For each prompt whether every store responsible for it was done with it in time. A store that is full
            of blocks being read may have kept less of it, or nothing.

        Raises:
            PlanError: a block id is out of range or named twice; nothing was offered.
        """
        deadline_s = time.monotonic() + time_span("timeout_s", timeout_s)
        prompts = [self._checked(number, prompt) for number, prompt in enumerate(prompts)]  # before any is published
        for number, prompt in enumerate(prompts):
            check_published(f"prompt {number}", self._engine.limits, [prompt.blocks], prompt.keys.num_tokens)
        owners: dict[_Name, int] = {}
        try:
            done = [self._offer(prompt, deadline_s, owners, number) for number, prompt in enumerate(prompts)]
            while self._open and self._take_events(deadline_s):
                pass
        finally:  # also if this was interrupted: the caller writes there again
            self._open.clear()
            late = {number for name, number in owners.items() if self._engine.withdraw(name)}
        done = [each and number not in late for number, each in enumerate(done)]
        self.counts.prompts_offered += len(prompts)
        self.counts.prompts_stored += sum(done)
        return done

    def _checked(self, number: int, prompt: Prompt) -> Prompt:
        """Read the blocks and the start of a prompt, of whatever class they are."""
        where = f"prompt {number}"
        if not isinstance(getattr(prompt, "keys", None), PrefixKeys):
            raise PlanError(f"{where} must be a kvrdma.store.Prompt with keys of StorePort.keys, got {prompt!r:.80}")
        if prompt.keys.block_tokens != self.block_tokens:
            raise PlanError(
                f"{where}: its keys are of blocks of {prompt.keys.block_tokens} tokens, this port's have "
                f"{self.block_tokens}: use the keys of this port"
            )
        try:
            groups = groups_of(prompt.blocks)
        except PlanError as error:
            raise PlanError(f"{where}: {error}") from None
        if len(groups) != 1:
            raise PlanError(f"{where}: blocks must be one list of block ids, got {len(groups)} lists")
        start = whole(f"{where}: start", prompt.start)
        if start < 0:
            raise PlanError(f"{where}: start {start} must not be negative")
        return replace(prompt, blocks=groups[0], start=start)

    def _offer(self, prompt: Prompt, deadline_s: float, owners: dict[_Name, int], number: int) -> bool:
        """Offer a prompt to the stores responsible for it; says whether all of them have it, or read it now."""
        answers: list[bool] = []
        for client, ask_s in self._stores.candidates(prompt.keys.keys[0], deadline_s) if prompt.keys.keys else ():
            name = ("put", next(self._numbers))
            owners[name] = number
            reply = self._offer_to(client, prompt, name, (ask_s, deadline_s))
            if reply is None or not reply.accepted:
                del owners[name]
                self._engine.withdraw(name)
            else:
                self._open.add(name)
            if reply is not None:
                answers.append(reply.accepted or not reply.missing)
            if len(answers) == self._stores.replicas:
                break
        return len(answers) == self._stores.replicas and all(answers)

    def _offer_to(
        self, client: StoreClient, prompt: Prompt, name: _Name, limits: tuple[float, float]
    ) -> StoreOffered | None:
        try:
            reference = self._engine.publish(name, prompt.blocks, prompt.keys.num_tokens)
        except LeaseError:
            return None
        ask_s, deadline_s = limits
        offer = StoreOffer(
            self._family,
            self._engine.identity.rank.rank,
            prompt.keys.joined(),
            prompt.keys.num_tokens,
            msgspec.msgpack.encode(reference.to_params()),
            min(max(deadline_s - time.monotonic(), 1e-3), _MAX_WITHIN_S),
        )
        return client.ask(offer, StoreOffered, min(ask_s, self._stores.config.control_timeout_s))

    # Out of the stores

    def look(self, prompts: Sequence[PrefixKeys], timeout_s: float) -> list[int]:
        """Say how many tokens of each prompt the stores have from its start on, without holding them."""
        deadline_s = time.monotonic() + time_span("timeout_s", timeout_s)
        return [found[1].tokens if (found := self._find(keys, deadline_s, hold=False)) else 0 for keys in prompts]

    def get(self, prompts: Sequence[Prompt], timeout_s: float, *, look_s: float | None = None) -> list[int]:
        """Fetch as much of each prompt as the stores have, from its start on.

        Args:
            prompts: where to put them; ``blocks`` may be shorter than the prompt, then less is fetched.
            timeout_s: for all of them together.
            look_s: of that, how long stores may take to say what they have; all of it by default.

        Returns:
            For each how many tokens are in place. Beyond them its blocks may hold anything.

        Raises:
            PlanError: a block id or ``start`` is out of range, or a block named twice; nothing was fetched.
            PullError: a transport may still write into the blocks, long after the deadline: they must not be used.
        """
        start_s = time.monotonic()
        deadline_s = start_s + time_span("timeout_s", timeout_s)
        look_until_s = deadline_s if look_s is None else min(deadline_s, start_s + time_span("look_s", look_s))
        prompts = [self._checked(number, prompt) for number, prompt in enumerate(prompts)]
        for number, prompt in enumerate(prompts):
            self._check_wanted(f"prompt {number}", prompt)
        try:
            fetches = [self._start(prompt, look_until_s, deadline_s) for prompt in prompts]
            tokens = [fetch if isinstance(fetch, int) else self._finish(fetch, deadline_s) for fetch in fetches]
        finally:
            self._give_up()
        self.counts.tokens_fetched += sum(got - prompt.start for got, prompt in zip(tokens, prompts, strict=True))
        return tokens

    def _check_wanted(self, where: str, prompt: Prompt) -> None:
        """Refuse blocks that are not there, or cannot be filled; they may be shorter than the prompt."""
        if prompt.start > prompt.keys.num_tokens:
            raise PlanError(f"{where}: start {prompt.start} is behind its {prompt.keys.num_tokens} tokens")
        limits = self._engine.limits
        check_published(where, limits, [prompt.blocks], 0)
        filled = prompt.blocks[prompt.start // self._own_block : limits.blocks_of(0, prompt.keys.num_tokens)]
        check_apart(where, 0, filled)

    def _find(self, keys: PrefixKeys, deadline_s: float, *, hold: bool) -> tuple[StoreClient, StoreFound] | None:
        """Ask the responsible stores for a prompt until one has all of it; the one that has most counts."""
        self.counts.prompts_looked_up += 1
        self.counts.tokens_looked_up += keys.num_tokens
        best: tuple[StoreClient, StoreFound] | None = None
        asked = 0
        question = StoreLookup(self.fingerprint, keys.joined(), keys.num_tokens, hold)
        for client, ask_s in self._stores.candidates(keys.keys[0], deadline_s) if keys.keys else ():
            found = client.ask(question, StoreFound, ask_s)
            asked += found is not None
            if found is not None and found.blocks and (best is None or found.tokens > best[1].tokens):
                if best is not None:
                    self._release(best)
                best = client, found
            elif found is not None and found.lease:
                self._release((client, found))
            if asked == self._stores.replicas or (best is not None and best[1].tokens >= keys.num_tokens):
                break
        return best

    def _release(self, held: tuple[StoreClient, StoreFound]) -> None:
        client, found = held
        if found.lease:
            client.ask(StoreRelease(found.lease), Noted, _RELEASE_S)

    def _start(self, prompt: Prompt, look_until_s: float, deadline_s: float) -> _Fetch | int:
        """Begin to fetch a prompt, or say how many tokens are in place without."""
        best = self._find(prompt.keys, look_until_s, hold=True)
        if best is None:
            return prompt.start
        number = next(self._numbers)
        name = ("get", number)
        try:
            reference = read_reference(best[1].reference)
            tokens = min(best[1].tokens, reference.num_tokens, len(prompt.blocks) * self._own_block)
            if tokens <= prompt.start:
                self._release(best)
                return prompt.start
            wanted = TokenRange(prompt.start, tokens)
            left_s = max(1e-3, deadline_s - time.monotonic())
            self._fetching.add(name)
            self._engine.pull(name, reference, [BlockSpan(list(prompt.blocks))], tokens=wanted, timeout_s=left_s)
        except MessageError:
            self.counts.fetches_failed += 1
            self._release(best)
            return prompt.start
        except KVRDMAError:
            self._fetching.discard(name)  # it was refused
            raise
        # Its own engine's done message ends the lease, unless the store waits for other ranks as well.
        several = self._engine.identity.shape.num_ranks > 1
        return _Fetch(number, prompt.start, tokens, best if several else None)

    def _finish(self, fetch: _Fetch, deadline_s: float) -> int:
        name = ("get", fetch.number)
        # The engine itself ends a pull soon after its deadline; what it calls quarantined may still be written.
        while name not in self._pulls:
            self._take_events(max(deadline_s, time.monotonic()) + 1.0)
        event = self._pulls.pop(name)
        self._fetching.discard(name)
        if fetch.release is not None:
            self._release(fetch.release)
        if isinstance(event, PullDone):
            return fetch.tokens
        self.counts.fetches_failed += 1
        if isinstance(event, PullFailed) and event.quarantined:
            self._wait_for_release(name)
        return fetch.start

    def _give_up(self) -> None:
        """End the pulls of a ``get`` that raises: their blocks are the caller's again, who may write there at once."""
        for name in self._fetching:
            self._engine.abort(name)
        until_s = time.monotonic() + _QUARANTINE_S
        while any(map(self._may_write, self._fetching)) and self._take_events(until_s):
            pass
        for name in filter(self._may_write, self._fetching):
            _log.warning("pull %s has not ended: the blocks that it was to fill may still be written", name)
        for name in self._fetching:
            self._pulls.pop(name, None)
        self._fetching.clear()

    def _may_write(self, name: _Name) -> bool:
        event = self._pulls.get(name)
        return event is None or (isinstance(event, PullFailed) and event.quarantined)

    def _wait_for_release(self, name: _Name) -> None:
        until_s = time.monotonic() + _QUARANTINE_S
        while name not in self._pulls:
            if not self._take_events(until_s):
                raise PullError(
                    f"a transport has not given up a read {_QUARANTINE_S:g} s after its deadline: the blocks that it "
                    "was to fill may still be written; do not use them before this process is restarted"
                )
        del self._pulls[name]

    def _take_events(self, until_s: float) -> bool:
        """Wait for events; false when the time is over."""
        left_s = until_s - time.monotonic()
        events = self._engine.wait(max(0.0, left_s))
        for event in events:
            if isinstance(event, Ended):
                self._open.discard(event.request_id)
            else:
                self._pulls[event.request_id] = event
        return bool(events) or left_s > 0
