"""``KVOutputAggregator``: the outputs of all workers of one engine, combined into one.

It works on any objects with the attributes of ``WorkerOutput`` and ``ConnectorOutput``, such as vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrdma.errors import AggregationError


@dataclass(slots=True)
class ConnectorOutput:
    """What one worker's connector says after a step; the names are vLLM's."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    """With ``aggregate(other)``."""
    kv_cache_events: Any = None
    """With ``get_all_events()``, ``add_events(events)`` and ``increment_workers(n)``."""
    kv_connector_worker_meta: Any = None
    """With ``aggregate(other)``."""
    invalid_block_ids: set[int] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    expected_finished_count: int = 0
    """More than 0: how many workers have to report a request, from now on."""


@dataclass(slots=True)
class WorkerOutput:
    """One worker's output of a step, as far as this package looks at it."""

    kv_connector_output: Any = None


class _Tracker:
    """Counts which workers have reported a request."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, set[int]]] = {}

    def report(self, worker: int, request_ids: Iterable[str] | None, expected: int) -> set[str]:
        """Note one worker's reports; give the requests that are finished by them."""
        finished = set()
        for request_id in request_ids or ():
            needed, workers = self._seen.setdefault(request_id, (expected, set()))
            workers.add(worker)
            if len(workers) >= needed:
                del self._seen[request_id]
                finished.add(request_id)
        return finished


class KVOutputAggregator:
    """Says that a request is finished once enough workers have said so, over any number of steps.

    A worker that reports a request twice before it is finished counts once: vLLM's class counts it twice, and would
    free blocks that another worker still sends.
    """

    def __init__(self, expected_finished_count: int) -> None:
        """Wait for this many workers per request.

        Raises:
            AggregationError: fewer than 1.
        """
        if expected_finished_count < 1:
            raise AggregationError(f"expected_finished_count={expected_finished_count}: needs at least 1 worker")
        self._expected = expected_finished_count
        self._sending, self._recving = _Tracker(), _Tracker()
        self._failed: set[str] = set()
        self._deferred: list[tuple[int, Any]] = []
        self._type: type[Any] = ConnectorOutput

    @classmethod
    def from_connector(cls, connector: Any, world_size: int) -> KVOutputAggregator:  # noqa: ANN401
        """Wait for as many workers as ``connector.get_finished_count()`` says, or for all of them."""
        return cls(connector.get_finished_count() or world_size)

    def ft_defer_kv_connector_outputs(self, outputs: Sequence[Any]) -> None:
        """Keep what the workers of a failed step have said for the next ``aggregate``; events are dropped."""
        for worker, output in enumerate(outputs):
            said = output and output.kv_connector_output
            if said:
                said.kv_cache_events = None
                self._deferred.append((worker, said))

    def aggregate(self, outputs: Sequence[Any], output_rank: int = 0) -> Any:  # noqa: ANN401
        """Combine one step's outputs of all workers.

        Args:
            outputs: by worker.
            output_rank: whose output is returned.

        Returns:
            ``outputs[output_rank]`` with its ``kv_connector_output`` replaced by the combination; None if it is falsy.

        Raises:
            AggregationError: another worker gave no output, or the workers' stats are of different types.
        """
        chosen = outputs[output_rank]
        if not chosen:
            return None
        missing = [worker for worker, output in enumerate(outputs) if output is None]
        if missing:
            raise AggregationError(f"workers {missing} of {len(outputs)} gave no output where rank {output_rank} did")
        now = [(worker, output.kv_connector_output) for worker, output in enumerate(outputs)]
        said = [*self._deferred, *((worker, each) for worker, each in now if each)]
        self._deferred = []
        chosen.kv_connector_output = self._combine(said)
        return chosen

    def _combine(self, said: Sequence[tuple[int, Any]]) -> Any:  # noqa: ANN401
        sending: set[str] = set()
        recving: set[str] = set()
        invalid: set[int] = set()
        for worker, each in said:
            self._type = type(each)
            if each.expected_finished_count > 0:
                self._expected = each.expected_finished_count
            sending |= self._sending.report(worker, each.finished_sending, self._expected)
            recving |= self._recving.report(worker, each.finished_recving, self._expected)
            invalid |= each.invalid_block_ids
            self._failed |= each.failed_recving
        failed = self._failed & recving
        self._failed -= failed
        return self._type(
            finished_sending=sending or None,
            finished_recving=recving or None,
            kv_connector_stats=_fold(each.kv_connector_stats for _, each in said),
            kv_cache_events=_fold((each.kv_cache_events for _, each in said), _join_events),
            kv_connector_worker_meta=_fold(each.kv_connector_worker_meta for _, each in said),
            invalid_block_ids=invalid,
            failed_recving=failed,
            expected_finished_count=self._expected,
        )


def _fold(values: Iterable[Any], join: Callable[[Any, Any], Any] = lambda one, two: one.aggregate(two)) -> Any:  # noqa: ANN401
    """Join what is there, in order; None if nothing is."""
    folded = None
    for value in values:
        if folded is None:
            folded = value
        elif value:
            if not isinstance(folded, type(value)):
                kinds = f"{type(folded).__name__} and {type(value).__name__}"
                raise AggregationError(f"workers gave {kinds}: use one connector on all of them")
            folded = join(folded, value)
    return folded or None


def _join_events(one: Any, two: Any) -> Any:  # noqa: ANN401
    one.add_events(two.get_all_events())
    one.increment_workers(1)
    return one
