"""Scheduler side of the consumer: which requests are pulled, held or declined."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrdma.breaker import CircuitBreaker
from kvrdma.connector.groups import TransferGroups
from kvrdma.connector.metadata import Load, StepMetadata
from kvrdma.connector.metrics import Counts
from kvrdma.connector.partial import PartialBlocks
from kvrdma.connector.prompt import prompt_digest
from kvrdma.errors import MessageError
from kvrdma.plan import TokenRange
from kvrdma.reference import PeerKey, PullReference

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from kvrdma.connector.options import ConnectorOptions

_MAX_BREAKERS = 1024
_PROBE_WINDOW_S = 10.0
_WARN_EVERY_S = 60.0
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Wish:
    """A request that names a producer; ends when it is loaded or declined, then waits for its load."""

    reference: PullReference
    turn_back: bool
    wanted: bool | None = None
    """Decided once, at the first look."""
    start: int = 0
    num_tokens: int = 0
    """Ordered, from ``start``."""
    loading: bool = False
    blamed: bool = False


class Loads:
    """Decides, request by request, what to pull; remembers producers that fail."""

    def __init__(
        self,
        groups: TransferGroups,
        options: ConnectorOptions,
        counts: Counts,
        *,
        backoff: int = 1,
        expects_params: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nothing.

        Args:
            groups: the KV groups that are exchanged.
            options: settings.
            counts: where to count.
            backoff: last tokens of a prompt that are computed here in any case; the last one yields the logits.
            expects_params: whether every request should name a producer.
            clock: seconds, monotonic.
        """
        self.counts = counts
        self.partial = PartialBlocks()
        self._groups = groups
        self._options = options
        self._backoff = backoff
        self._expects_params = expects_params
        self._clock = clock
        self._wishes: dict[str, _Wish] = {}
        self._breakers: OrderedDict[PeerKey, CircuitBreaker] = OrderedDict()
        self._silent_until_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._wishes)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._wishes

    def breakers_open(self) -> int:
        """Count the producers that are left alone now."""
        return sum(breaker.is_open for breaker in self._breakers.values()) if self._breakers else 0

    # The life of a request

    def arrived(self, request: Request, step: StepMetadata) -> None:
        """Note a new request, and keep its producer's lease alive while it waits."""
        params = request.kv_transfer_params
        if not params or not (params.get("do_remote_prefill") or params.get("do_remote_decode")):
            self.names_no_producer(request)
            return
        wish = self._read(request, params)
        if wish is not None:
            self._wishes[request.request_id] = wish
            step.hold.append((request.request_id, wish.reference))

    def names_no_producer(self, request: Request) -> None:
        """Note a new request whose prompt is computed here."""
        if self._expects_params:
            self.counts.requests_without_params += 1
            self._warn(
                "without params",
                "got request %s without kv_transfer_params of a producer: its prompt is "
                "computed here; is there a proxy in front of this engine?",
                request.request_id,
            )

    def available(self, request: Request, num_computed_tokens: int) -> int:
        """Count the tokens to pull beyond those that are here; may be asked often."""
        wish = self._wishes.get(request.request_id)
        if wish is None or wish.loading:
            return 0
        if wish.wanted is None:
            wish.wanted = self._is_right(request, wish.reference) and self._breaker(wish.reference).allow()
        if not wish.wanted:
            return 0
        end: int = min(wish.reference.num_tokens, request.num_prompt_tokens - self._backoff)
        count = end - num_computed_tokens
        if self._groups.has_state and wish.reference.num_tokens != end:
            return 0  # a state is that of one position only
        if wish.turn_back and count < self._options.recompute_threshold:
            return 0
        wish.start = num_computed_tokens
        return max(0, count)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_tokens: int, step: StepMetadata) -> None:
        """Pull ``num_tokens``; decline if there are none. Later calls for the same request change nothing."""
        wish = self._wishes.get(request.request_id)
        if wish is None or wish.loading:
            self.partial.allocated(request.request_id)
            return
        self._spend(request)
        if num_tokens == 0:
            self._decline(request.request_id, wish, step)
            return
        wish.loading, wish.num_tokens = True, num_tokens
        tokens = TokenRange(wish.start, wish.start + num_tokens)
        groups = self._groups.to_load(blocks.get_block_ids(), tokens, self._first_tokens(request))
        self.partial.loading(request.request_id, groups)
        step.load.append(Load(request.request_id, wish.reference, groups))

    def finished(self, request: Request, step: StepMetadata) -> bool:
        """Note that a request is over, however; False if it never got what it wanted to load."""
        wish = self._wishes.get(request.request_id)
        if wish is None:
            return True
        if wish.loading:
            step.abort.append(request.request_id)  # its end is still to be reported
            return False
        self._spend(request)
        self._decline(request.request_id, wish, step)
        return False

    def _decline(self, request_id: str, wish: _Wish, step: StepMetadata) -> None:
        del self._wishes[request_id]
        self.counts.requests_declined += 1
        step.decline.append(wish.reference)

    @staticmethod
    def _spend(request: Request) -> None:
        """Leave no second use of the params: vLLM schedules a request again after a failed load."""
        params = request.kv_transfer_params
        if params is not None:
            params["do_remote_prefill"] = False

    # What workers report

    def ended(self, received: Collection[str], failed: Collection[str]) -> None:
        """Note loads that have ended on every rank."""
        for request_id in received:
            wish = self._wishes.pop(request_id, None)
            if request_id in failed:
                self.partial.forget(request_id)
            if wish is None:
                continue
            if request_id not in failed:
                self.counts.requests_loaded += 1
                self.counts.tokens_loaded += wish.num_tokens
            if wish.blamed:
                self._breaker(wish.reference).record_failure()
            elif request_id not in failed:
                self._breaker(wish.reference).record_success()

    def blame(self, request_ids: Collection[str]) -> None:
        """Note loads that failed on some rank because of their producer."""
        for request_id in request_ids:
            wish = self._wishes.get(request_id)
            if wish is not None:
                wish.blamed = True

    # Reading params

    def _read(self, request: Request, params: Mapping[str, Any]) -> _Wish | None:
        turn_back = bool(params.get("do_remote_decode"))
        if turn_back and not (self._options.bidirectional and params.get("kvrdma")):
            return None
        try:
            return _Wish(PullReference.from_params(params), turn_back)
        except MessageError as error:
            self.counts.requests_malformed += 1
            self._spend(request)
            self._warn("malformed", "request %s: %s; its prompt is computed here", request.request_id, error)
            return None

    def _is_right(self, request: Request, reference: PullReference) -> bool:
        """Whether the reference is of this request's own tokens, where its producer has said which."""
        theirs = (request.kv_transfer_params or {}).get("kvrdma", {}).get("prompt")
        if theirs is None or theirs == prompt_digest(request, reference.num_tokens):
            return True
        self.counts.requests_malformed += 1
        self._warn(
            "other prompt",
            "request %s: engine %s computed other tokens than this request's: its prompt is "
            "computed here; do both engines have the same tokenizer and chat template?",
            request.request_id,
            reference.engine_id,
        )
        return False

    def _first_tokens(self, request: Request) -> Sequence[int | None]:
        """The first position that the producer has, per KV group; None where it has not said."""
        said = (request.kv_transfer_params or {}).get("kvrdma", {}).get("first_tokens")
        if isinstance(said, list) and len(said) == len(self._groups) and all(type(n) is int and n >= 0 for n in said):
            return said
        return [None] * len(self._groups)

    def _warn(self, kind: str, text: str, *values: Any) -> None:  # noqa: ANN401 - as for a logger
        """Warn at most once a minute of each kind."""
        now_s = self._clock()
        if now_s >= self._silent_until_s.get(kind, now_s):
            self._silent_until_s[kind] = now_s + _WARN_EVERY_S
            _log.warning(text, *values)

    def _breaker(self, reference: PullReference) -> CircuitBreaker:
        """The breaker of one start of a producer."""
        key = reference.peer
        found = self._breakers.get(key)
        if found is None:
            config = self._options.config
            found = CircuitBreaker(
                reference.engine_id, config.breaker_cooldown_s, config.breaker_threshold, _PROBE_WINDOW_S, self._clock
            )
            self._breakers[key] = found
            if len(self._breakers) > _MAX_BREAKERS:
                self._breakers.popitem(last=False)
        self._breakers.move_to_end(key)
        return found
