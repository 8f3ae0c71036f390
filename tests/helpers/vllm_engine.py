"""A vLLM engine in a process of its own, stepped by itself and driven through a pipe."""

# ruff: noqa: ANN401 - vLLM's objects are not type-checked with us

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from kvrdma.testing import freeze

START_S = 420.0
CALL_S = 180.0


@dataclass(frozen=True)
class Answer:
    """How a request ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    """Per generated token: the five most likely ones."""
    finish_reason: str
    params: dict[str, Any] | None
    """For the consumer."""
    elapsed_s: float
    """From its arrival in the engine's process to its end."""


@dataclass
class _State:
    engine: Any
    seen: dict[str, int]
    """What vLLM counted: prompt tokens from another engine and from its own cache."""
    arrived_s: dict[str, float] = field(default_factory=dict)
    ended: dict[str, Answer] = field(default_factory=dict)
    half_read: threading.Event = field(default_factory=threading.Event)
    read_on: threading.Event = field(default_factory=threading.Event)


class EngineProcess:
    """Runs one engine; every call waits for its answer."""

    def __init__(self, model: str, transfer: Mapping[str, Any] | None, **arguments: Any) -> None:
        """Begin to start; ``wait_ready`` waits for it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, model, transfer, arguments))
        os.environ["OMP_NUM_THREADS"] = "1"  # here: the child imports torch, which reads it, before it runs anything
        self.process.start()
        theirs.close()

    def wait_ready(self) -> EngineProcess:
        """Wait until it takes requests."""
        self._receive(START_S)
        return self

    def call(self, name: str, *arguments: Any) -> Any:
        """Call one of the ``_do_`` functions there."""
        self._pipe.send((name, arguments))
        return self._receive(CALL_S)

    def generate(
        self, request_id: str, prompt: Sequence[int], params: Mapping[str, Any] | None = None, max_tokens: int = 6
    ) -> Answer:
        """Run one request to its end."""
        self.call("add", request_id, list(prompt), params, max_tokens)
        return self.result(request_id)

    def result(self, request_id: str) -> Answer:
        """Wait for a request to end."""
        answer = self.call("result", request_id)
        assert isinstance(answer, Answer)
        return answer

    def wait_idle(self, timeout_s: float = 30.0) -> dict[str, int]:
        """Wait until no block is in use and the connector's maps are empty; returns what was left."""
        deadline_s = time.monotonic() + timeout_s
        while any((left := self.call("left")).values()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return dict(left)

    def wait_until(self, name: str, timeout_s: float = 60.0) -> None:
        """Wait until a call says yes."""
        deadline_s = time.monotonic() + timeout_s
        while not self.call(name):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not {name} within {timeout_s} s")
            time.sleep(0.01)

    def freeze(self) -> None:
        """Stop it where it stands, until ``thaw``."""
        freeze(self.process.pid or 0)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.process.pid or 0, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it at once."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Stop it in an orderly way."""
        if self.process.is_alive():
            self.thaw()
            self._pipe.send(("stop", ()))
            self.process.join(20)
        if self.process.is_alive():
            self.kill()

    def _receive(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the engine gave no answer within {timeout_s} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value


def _serve(pipe: Connection, model: str, transfer: Mapping[str, Any] | None, arguments: dict[str, Any]) -> None:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "KVRDMA_TRANSPORTS": "cma",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    } | arguments.pop("environ", {})
    sys.path.extend(arguments.pop("paths", ()))
    try:
        seen = {"external_tokens": 0, "local_tokens": 0}
        state = _State(_make(model, transfer, arguments, seen), seen)
    except BaseException as error:  # noqa: BLE001 - told to the test
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        return
    pipe.send(("ready", None))
    _loop(pipe, state)


def _make(model: str, transfer: Mapping[str, Any] | None, arguments: dict[str, Any], seen: dict[str, int]) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    given = {
        "model": model,
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 64,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "seed": 0,
    } | arguments
    if transfer is not None:
        ours = {"kv_connector": "KvRdmaConnector", "kv_connector_module_path": "kvrdma.connector"}
        given["kv_transfer_config"] = KVTransferConfig(**(ours | dict(transfer)))
    return LLMEngine.from_engine_args(EngineArgs(**given), stat_loggers=[_counter_of(seen)])


def _counter_of(seen: dict[str, int]) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):  # type: ignore[misc] # vLLM is not type-checked with us
        """Adds up vLLM's own statistics."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                external = scheduler_stats.connector_prefix_cache_stats
                seen["external_tokens"] += external.hits if external else 0
                seen["local_tokens"] += scheduler_stats.prefix_cache_stats.hits

        def log_engine_initialized(self) -> None:
            pass

    return Counter


def _loop(pipe: Connection, state: _State) -> None:
    """Step the engine and answer calls, until told to stop."""
    core = state.engine.engine_core.engine_core
    waiting: str | None = None
    while True:
        busy = core.scheduler.has_requests()
        if busy:
            _step(state)
        if waiting is not None:
            if waiting in state.ended:
                pipe.send(("value", state.ended.pop(waiting)))
                waiting = None
        elif pipe.poll(0 if busy else 0.01):
            name, arguments = pipe.recv()
            if name == "stop":
                state.engine.engine_core.shutdown()
                os._exit(0)  # taking the interpreter down costs several seconds more and is not the subject
            if name == "result":
                waiting = arguments[0]
            else:
                _answer_call(pipe, state, name, arguments)


def _step(state: _State) -> None:
    outputs = state.engine.step()
    for output in outputs:
        if output.finished:
            elapsed_s = time.perf_counter() - state.arrived_s.pop(output.request_id)
            state.ended[output.request_id] = _answer(output, elapsed_s)
    if not outputs:
        time.sleep(0.001)  # as vLLM's own loop does when a step computes nothing: transfers need the interpreter


def _answer_call(pipe: Connection, state: _State, name: str, arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(("value", _COMMANDS[name](state, *arguments)))
    except Exception as error:  # noqa: BLE001 - told to the test
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def _do_add(state: _State, request_id: str, prompt: list[int], params: Any, max_tokens: int) -> None:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": dict(params)} if params else None
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=5, ignore_eos=True, detokenize=False, extra_args=extra
    )
    state.arrived_s[request_id] = time.perf_counter()
    state.engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)


def _do_abort(state: _State, request_id: str) -> None:
    state.engine.abort_request([request_id])


def _do_left(state: _State) -> dict[str, int]:
    scheduler = state.engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    left = {
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "requests": len(scheduler.requests),
    }
    if hasattr(scheduler.connector, "scheduler"):
        left |= scheduler.connector.scheduler.idle
    return left


def _do_seen(state: _State) -> dict[str, int]:
    return dict(state.seen)


def _do_cpu(_: _State) -> float:
    """Seconds of processor time that this process has used, all threads."""
    return time.process_time()


def _do_forget_prefixes(state: _State) -> bool:
    return bool(state.engine.reset_prefix_cache())


def _do_metrics(state: _State) -> dict[str, float]:
    from prometheus_client import REGISTRY

    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for metric in REGISTRY.collect()
        if metric.name.startswith("vllm:kvrdma")
        for sample in metric.samples
    }


def _do_profile(state: _State) -> None:
    from tests.helpers.connector_profile import profile

    profile(state.engine.engine_core.engine_core.scheduler.connector, state.seen)


def _do_stats(state: _State) -> dict[str, int]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return dict(get_kv_transfer_group().worker.engine.stats())


def _do_counts(state: _State) -> dict[str, int]:
    from dataclasses import asdict

    connector = state.engine.engine_core.engine_core.scheduler.connector.scheduler
    return asdict(connector._loads.counts) | {"breakers_open": connector._loads.breakers_open()}


def _do_read_by_halves(state: _State) -> None:
    """Let every read of data stop after its first half, until ``read_on``."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    state.half_read.clear()
    state.read_on.clear()
    for transport in get_kv_transfer_group().worker.engine._memory.transports.values():
        transport.read = _halved(state, type(transport).read.__get__(transport))


def _halved(state: _State, read: Callable[..., Any]) -> Callable[..., Any]:
    def halves(peer: Any, rows: Any, then: Any = None) -> Any:
        if len(rows) > 1:  # not the word of a lease
            read(peer, rows[: len(rows) // 2])
            state.half_read.set()
            state.read_on.wait(CALL_S)
        return read(peer, rows, then)

    return halves


def _do_half_read(state: _State) -> bool:
    return state.half_read.is_set()


def _do_read_on(state: _State) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for transport in get_kv_transfer_group().worker.engine._memory.transports.values():
        del transport.read
    state.read_on.set()


def _do_groups(state: _State) -> list[str]:
    """The kind of each KV group."""
    config = state.engine.engine_core.engine_core.scheduler.kv_cache_config
    return [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]


def _do_status(state: _State, request_id: str) -> str:
    requests = state.engine.engine_core.engine_core.scheduler.requests
    found = [request for name, request in requests.items() if name.startswith(request_id)]
    return found[0].status.name if found else "gone"


_COMMANDS: dict[str, Callable[..., Any]] = {
    "add": _do_add,
    "abort": _do_abort,
    "left": _do_left,
    "seen": _do_seen,
    "cpu": _do_cpu,
    "forget_prefixes": _do_forget_prefixes,
    "metrics": _do_metrics,
    "profile": _do_profile,
    "stats": _do_stats,
    "counts": _do_counts,
    "status": _do_status,
    "groups": _do_groups,
    "read_by_halves": _do_read_by_halves,
    "half_read": _do_half_read,
    "read_on": _do_read_on,
}


def _answer(output: Any, elapsed_s: float) -> Answer:
    (one,) = output.outputs
    return Answer(
        tokens=tuple(one.token_ids),
        logprobs=tuple({token: each.logprob for token, each in step.items()} for step in one.logprobs or ()),
        finish_reason=str(one.finish_reason),
        params=output.kv_transfer_params,
        elapsed_s=elapsed_s,
    )
