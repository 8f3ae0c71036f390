"""What an agent has to know: how KV is transferred, and what the caches hold. The names follow vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from kvrdma.config import host_and_port
from kvrdma.errors import ConfigError, LayoutError
from kvrdma.handshake import check_model
from kvrdma.page_format import Kind, check_kind
from kvrdma.store.geometry import MAX_BLOCK_TOKENS
from kvrdma.topology import EngineShape

ROLES = ("kv_producer", "kv_consumer", "kv_both")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Which connector moves KV, and in which direction."""

    kv_connector: str | None = "kvrdma"
    """A name given to ``register_connector``."""
    kv_role: str | None = "kv_both"
    """``kv_producer`` sends, ``kv_consumer`` receives, ``kv_both`` does both."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    """Options of the connector; those of ``kvrdma`` are the fields of ``ConnectorOptions``."""

    @property
    def is_kv_transfer_instance(self) -> bool:
        """Whether there is anything to transfer."""
        return self.kv_connector is not None and self.kv_role in ROLES

    @property
    def is_kv_producer(self) -> bool:
        """Whether this engine sends."""
        return self.kv_connector is not None and self.kv_role in {"kv_producer", "kv_both"}

    @property
    def is_kv_consumer(self) -> bool:
        """Whether this engine receives."""
        return self.kv_connector is not None and self.kv_role in {"kv_consumer", "kv_both"}


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What the cache tensors cannot say; see ``LayerSpec``."""

    model: Mapping[str, str]
    """Whatever KV depends on: model, weights, quantisation. Engines exchange KV only where all of it is equal."""
    block_size: int
    """Tokens of a block: slot ``s`` lies in block ``s // block_size``."""
    num_kv_heads: int
    """Of the whole model."""
    tp_size: int = 1
    """Rank ``r`` of the agent is tensor parallel rank ``r % tp_size`` of pipeline stage ``r // tp_size``."""
    first_layer: int = 0
    """Number of the first cache, where caches come as a list: pipeline stages have different ones."""
    kind: Kind = "attention"
    dims: str | None = None
    dtype: str | None = None
    kv_split: bool = True

    def __post_init__(self) -> None:
        """Refuse what no cache can be.

        Raises:
            ConfigError: names the field.
        """
        try:
            check_kind("CacheFacts", self.kind, self.dims, self.dtype, self.kv_split)
        except LayoutError as error:
            raise ConfigError(str(error)) from None
        if self.kind == "state":
            raise ConfigError("CacheFacts: kind='state' is none that a store can hold: use attention, mla or cpu")
        for name, least in (("block_size", 1), ("num_kv_heads", 1), ("tp_size", 1), ("first_layer", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"CacheFacts: {name}={value!r} is not a whole number from {least}")
        check_model(self.model)

    @property
    def is_mla(self) -> bool:
        """Whether the cache is one latent per token."""
        return self.kind == "mla"

    @property
    def shape(self) -> EngineShape:
        """How the kv heads are shared out: ranks that hold the same heads count once."""
        heads = 1 if self.is_mla else self.num_kv_heads
        return EngineShape(min(self.tp_size, heads), self.num_kv_heads, is_mla=self.is_mla)

    def share(self, rank: int) -> int:
        """Say which share of the heads a rank holds.

        Raises:
            ConfigError: there is no such rank.
        """
        if type(rank) is not int or rank < 0:
            raise ConfigError(f"rank {rank!r} is not a whole number from 0")
        return rank % self.tp_size * self.shape.tp_size // self.tp_size


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Everything an agent is made from."""

    kv_transfer_config: TransferConfig | None
    cache: CacheFacts


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Options of the connector ``kvrdma``, from ``TransferConfig.kv_connector_extra_config``."""

    stores: Sequence[str] = ()
    """``HOST:PORT`` of each store, spelled alike by everybody."""
    replicas: int = 1
    """In how many of them each prompt is kept."""
    serve_bytes: int = 0
    """More than 0: be a store as well, with so much memory: disaggregated prefill without another process."""
    serve_bind: str = "127.0.0.1:0"
    """Where that listens."""
    store_block_tokens: int | None = None
    """Tokens of a stored block, equal on all engines that share stores; ``block_size`` by default."""
    send_timeout_s: float = 5.0
    """How long ``send_…`` may take."""
    recv_timeout_s: float = 5.0
    """How long ``recv_…`` may take."""
    look_timeout_s: float = 0.5
    """Of that, how long stores may take to say what they have."""
    states: bool = True
    """Whether hidden or intermediate states travel too; without them a receiver cannot bypass its model."""
    states_bytes: int = 64 << 20
    """Room for them: the most that one prompt's states may take."""

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> ConnectorOptions:
        """Check the options of a ``TransferConfig``.

        Raises:
            ConfigError: one is unknown, or its value cannot be used; names it.
        """
        if not isinstance(extra, Mapping):
            raise ConfigError(f"kv_connector_extra_config must be a mapping, got {type(extra).__name__}")
        known = {each.name for each in fields(cls)}
        unknown = sorted(str(name) for name in set(extra) - known)
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        values = dict(extra)
        if isinstance(values.get("stores"), str):
            values["stores"] = [each.strip() for each in values["stores"].split(",") if each.strip()]
        try:
            options = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from None
        _check_values(options)
        if not options.stores and not options.serve_bytes:
            raise ConfigError(
                "kv_connector_extra_config: give stores=['HOST:PORT', ...] (started by `kvrdma store serve`), or "
                "serve_bytes to be one"
            )
        return options


def _check_values(options: ConnectorOptions) -> None:
    """Refuse what its type allows, but nothing can be done with."""
    try:
        host_and_port(options.serve_bind)
    except ValueError as error:
        raise ConfigError(f"kv_connector_extra_config: serve_bind: {error}") from None
    for name in ("send_timeout_s", "recv_timeout_s", "look_timeout_s"):
        if not 0 < getattr(options, name) <= 86400:
            raise ConfigError(f"kv_connector_extra_config: {name}={getattr(options, name)} is no time of 0 to 86400 s")
    least = {"replicas": 1, "serve_bytes": 0, "store_block_tokens": 1, "states_bytes": 1}
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            raise ConfigError(f"kv_connector_extra_config: {name}={value} must be at least {smallest}")
    if (options.store_block_tokens or 1) > MAX_BLOCK_TOKENS:
        raise ConfigError(
            f"kv_connector_extra_config: store_block_tokens={options.store_block_tokens} must be at most "
            f"{MAX_BLOCK_TOKENS}"
        )
