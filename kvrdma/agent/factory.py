"""Connectors by name; a connector's module is imported when it is first wanted."""

from __future__ import annotations

import importlib
import threading
from typing import Any, Protocol, TypeAlias

from kvrdma.agent.config import AgentConfig
from kvrdma.errors import ConfigError

Given: TypeAlias = Any
"""An object of the caller's engine, of whatever class."""
States: TypeAlias = Any
"""Hidden states, a tensor, or the intermediate tensors of a pipeline stage."""


class AgentConnector(Protocol):
    """What a ``KVTransferAgent`` calls; made as ``factory(rank, local_rank, config)``. See there for the meaning."""

    def send_kv_caches_and_hidden_states(
        self,
        model_executable: Given,
        model_input: Given,
        kv_caches: Given,
        hidden_or_intermediate_states: States,
    ) -> None:
        """Offer what a prefill has computed."""
        ...

    def recv_kv_caches_and_hidden_states(
        self,
        model_executable: Given,
        model_input: Given,
        kv_caches: Given,
    ) -> tuple[States | None, bool, Any]:
        """Fetch what a prefill would compute."""
        ...

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        ...


_lock = threading.Lock()
_places: dict[str, tuple[str, str]] = {"kvrdma": ("kvrdma.agent.connector", "StoreConnector")}


def register_connector(name: str, module: str, class_name: str) -> None:
    """Let configurations name a connector. Nothing is imported yet.

    Args:
        name: for ``TransferConfig.kv_connector``.
        module: where the class is.
        class_name: called as ``class_name(rank, local_rank, config)``.

    Raises:
        ConfigError: the name is taken, or something is no text.
    """
    for given in (name, module, class_name):
        if type(given) is not str or not given:
            raise ConfigError(f"a connector is registered by three texts, got {given!r}")
    with _lock:
        if name in _places:
            raise ConfigError(
                f"connector {name!r} is registered already ({'.'.join(_places[name])}): choose another name than for "
                f"{module}.{class_name}"
            )
        _places[name] = (module, class_name)


def unregister_connector(name: str) -> None:
    """Take a name back; unknown ones are ignored."""
    with _lock:
        _places.pop(name, None)


def create_connector(rank: int, local_rank: int, config: AgentConfig) -> AgentConnector:
    """Make the connector that a configuration names.

    Raises:
        ConfigError: the name is unknown, or its module or class is not there.
    """
    assert config.kv_transfer_config is not None
    name = config.kv_transfer_config.kv_connector
    with _lock:
        place = _places.get(str(name))
        known = ", ".join(sorted(_places))
    if place is None:
        raise ConfigError(f"connector {name!r} is unknown: registered are {known}; use register_connector for others")
    module, class_name = place
    try:
        factory = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError, ValueError) as error:  # the last: a name that cannot be one
        raise ConfigError(f"connector {name!r} ({module}.{class_name}) cannot be loaded: {error}") from error
    connector: AgentConnector = factory(rank, local_rank, config)
    return connector
