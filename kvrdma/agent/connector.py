"""``StoreConnector``, the connector ``kvrdma``: KV and states by way of one or more stores.

A sender publishes its blocks and the stores read them; a receiver reads the stores. A store may be a process of its
own or part of a sender (``serve_bytes``).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from kvrdma.agent.batch import ModelInput, Piece, read_batch, read_starts
from kvrdma.agent.config import AgentConfig, ConnectorOptions
from kvrdma.agent.factory import Given, States
from kvrdma.agent.states import StatesPort, join_states, slice_states
from kvrdma.config import Config
from kvrdma.engine import Engine
from kvrdma.errors import ConfigError, LayoutError, MessageError
from kvrdma.handshake import Identity
from kvrdma.page_format import LayerSpec, TensorView
from kvrdma.store import Prompt, StorePort, Stores, StoreServer
from kvrdma.store.index import require_room
from kvrdma.topology import RankId

_log = logging.getLogger(__name__)


class StoreConnector:
    """One worker's way to the stores. For one thread."""

    def __init__(self, rank: int, local_rank: int, config: AgentConfig, base: Config | None = None) -> None:
        """Read the options; engines are opened when caches are first seen.

        Args:
            rank: of the worker in its engine.
            local_rank: unused.
            config: of the agent.
            base: settings; ``Config.from_env()`` by default.

        Raises:
            ConfigError: an option cannot be used.
        """
        del local_rank
        assert config.kv_transfer_config is not None
        self._transfer = config.kv_transfer_config
        self._facts = config.cache
        self._share = config.cache.share(rank)
        self._first = rank % config.cache.tp_size == 0
        self.options = ConnectorOptions.read(self._transfer.kv_connector_extra_config)
        self._config = base or Config.from_env()
        self._name = f"agent-{secrets.token_hex(8)}"
        self.server: StoreServer | None = None
        """The store that this worker is, if it is one."""
        if self.options.serve_bytes:
            serving = replace(self._config, bind=self.options.serve_bind)
            self.server = StoreServer(self.options.serve_bytes, serving)
        own = [str(self.server.endpoint)] if self.server else []
        try:
            self.stores = Stores([*self.options.stores, *own], self._config, replicas=self.options.replicas)
        except BaseException:
            self._close_server()
            raise
        self._engine: Engine | None = None
        self._port: StorePort | None = None
        self._states: StatesPort | None = None
        self._seen: tuple[object, ...] = ()
        self._closed = False

    # Sending

    def send_kv_caches_and_hidden_states(
        self,
        model_executable: Given,  # noqa: ARG002 - part of the interface
        model_input: Given,
        kv_caches: Given,
        hidden_or_intermediate_states: States,
    ) -> None:
        """Let the stores read a batch; see ``KVTransferAgent``."""
        if not self._transfer.is_kv_producer:
            raise ConfigError(f"kv_role {self._transfer.kv_role!r} does not send: use kv_producer or kv_both")
        deadline_s = time.monotonic() + self.options.send_timeout_s
        port = self._open(kv_caches)
        pieces = read_batch(model_input, self._facts.block_size)
        prompts = [self._prompt(port, piece) for piece in pieces]
        _synchronize(kv_caches)
        stored = port.put(prompts, self.options.send_timeout_s)
        # The states are the same on all ranks of a stage: one of them sends them.
        if hidden_or_intermediate_states is None or not self.options.states or not self._first:
            return
        cut = slice_states(hidden_or_intermediate_states, [(piece.start, piece.end) for piece in pieces])
        wanted = [
            (prompt.keys.keys[-1], content)
            for prompt, content, kept in zip(prompts, cut, stored, strict=True)
            if kept  # without its KV a prompt's states are of no use
        ]
        if wanted:
            self._open_states().put(wanted, max(0.0, deadline_s - time.monotonic()))

    # Receiving

    def recv_kv_caches_and_hidden_states(
        self,
        model_executable: Given,  # noqa: ARG002 - part of the interface
        model_input: Given,
        kv_caches: Given,
    ) -> tuple[States | None, bool, Any]:
        """Read a batch from the stores; see ``KVTransferAgent``."""
        if not self._transfer.is_kv_consumer:
            raise ConfigError(f"kv_role {self._transfer.kv_role!r} does not receive: use kv_consumer or kv_both")
        deadline_s = time.monotonic() + self.options.recv_timeout_s
        port = self._open(kv_caches)
        pieces = read_batch(model_input, self._facts.block_size)
        starts = read_starts(model_input, len(pieces))
        prompts = [replace(self._prompt(port, piece), start=start) for piece, start in zip(pieces, starts, strict=True)]
        tokens = port.get(prompts, self.options.recv_timeout_s, look_s=self.options.look_timeout_s)
        complete = bool(pieces) and all(got == len(piece.tokens) for got, piece in zip(tokens, pieces, strict=True))
        states = None
        if complete and self.options.states:
            states = self._fetch_states(prompts, deadline_s, _device_of(kv_caches))
            complete = states is not None
        if not complete and isinstance(model_input, ModelInput):
            model_input = replace(model_input, context_lens=tuple(tokens))
        return states, complete, model_input

    def _fetch_states(self, prompts: Sequence[Prompt], deadline_s: float, device: Any) -> States | None:  # noqa: ANN401
        port = self._open_states()
        pieces = []
        for prompt in prompts:
            piece = port.get(prompt.keys.keys[-1], max(0.0, deadline_s - time.monotonic()))
            if piece is None:
                return None
            pieces.append(piece)
        try:
            return join_states(pieces, device)
        except MessageError as error:
            _log.warning("the stores' states of a batch are left alone, and computed again: %s", error)
            return None

    # Opening and closing

    def _prompt(self, port: StorePort, piece: Piece) -> Prompt:
        return Prompt(port.keys(piece.tokens, piece.salt), piece.blocks)  # type: ignore[arg-type]

    def _open(self, kv_caches: Given) -> StorePort:
        """Open the engine over the caches, the first time; afterwards they have to be the same.

        Raises:
            ConfigError: they are others, or the connector is closed.
        """
        if self._closed:
            raise ConfigError("this KV connector is closed")
        caches = self._named(kv_caches)
        seen = tuple(
            (name, view.addr, view.shape)
            for name, cache in caches.items()
            for view in map(TensorView.of, cache if isinstance(cache, tuple | list) else (cache,))
        )
        if self._port is not None:
            if seen != self._seen:
                raise ConfigError(
                    "these kv_caches are not those of the first call: they were registered for transfers then; make "
                    "another agent for others"
                )
            return self._port
        facts, shape = self._facts, self._facts.shape
        spec = LayerSpec(
            heads=shape.heads(self._share),
            total_heads=shape.total_heads,
            block_size=facts.block_size,
            kind=facts.kind,
            dims=facts.dims,
            dtype=facts.dtype,
            kv_split=facts.kv_split,
        )
        identity = Identity(self._name, shape, RankId(0, self._share), model=dict(facts.model))
        engine = Engine(caches, spec, identity, self._config)
        try:
            port = StorePort(engine, self.stores, self.options.store_block_tokens or facts.block_size)
            if self.server is not None:
                require_room(self.server.capacity, port.record_nbytes)  # serve_bytes
        except BaseException:
            engine.close()
            raise
        self._engine, self._port, self._seen = engine, port, seen
        return port

    def _named(self, kv_caches: Given) -> Mapping[str, Any]:
        if isinstance(kv_caches, Mapping):
            return kv_caches
        if isinstance(kv_caches, str) or not hasattr(kv_caches, "__iter__") or hasattr(kv_caches, "shape"):
            raise LayoutError(
                f"kv_caches must be one cache per layer, in a list or by name, got {type(kv_caches).__name__}"
            )
        return {f"layer{self._facts.first_layer + number}": cache for number, cache in enumerate(kv_caches)}

    def _open_states(self) -> StatesPort:
        if self._states is None:
            self._states = StatesPort(self.stores, self._config, self.options.states_bytes, f"{self._name}-states")
        return self._states

    def stats(self) -> dict[str, int]:
        """Give what was offered and fetched so far, in prompts and tokens."""
        counts = self._port.counts if self._port is not None else None
        names = ("prompts_offered", "prompts_stored", "prompts_looked_up", "tokens_looked_up", "tokens_fetched")
        return {name: getattr(counts, name, 0) for name in (*names, "fetches_failed")}

    def close(self) -> None:
        """Close engines, connections and the store. Idempotent."""
        self._closed = True
        with ExitStack() as stack:  # a defect that comes out of one keeps the others from nothing
            stack.callback(self._close_server)
            stack.callback(self.stores.close)
            if self._engine is not None:
                stack.callback(self._engine.close)
            if self._states is not None:
                stack.callback(self._states.close)

    def _close_server(self) -> None:
        if self.server is not None:
            self.server.close()


def _first_tensor(kv_caches: Given) -> Any:  # noqa: ANN401
    cache = next(iter(kv_caches.values() if isinstance(kv_caches, Mapping) else kv_caches))
    return cache[0] if isinstance(cache, tuple | list) else cache


def _device_of(kv_caches: Given) -> Any:  # noqa: ANN401
    return getattr(_first_tensor(kv_caches), "device", "cpu")


def _synchronize(kv_caches: Given) -> None:
    """Wait for the kernels that write the caches: others read them from now on."""
    device = _device_of(kv_caches)
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        torch.cuda.synchronize(device)
