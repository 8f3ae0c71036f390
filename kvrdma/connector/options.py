"""What a user can set: ``KVRDMA_*`` variables and ``kv_connector_extra_config``, which wins."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvrdma.config import VARIABLES, Config, parse_setting
from kvrdma.errors import ConfigError
from kvrdma.sidechannel import Endpoint

_LAST_PORT = 65535
_ENV_ONLY = {"secret"}
"""Would show in process lists and logs."""
_NIXL_NAMES = {"kv_lease_duration": "lease_s", "engine_ttl": "peer_idle_s"}
"""NixlConnector's names for settings of ours."""
_VARIABLES = {field: name for name, (field, _) in VARIABLES.items() if field not in _ENV_ONLY}
"""Variable of each field that may be given here."""


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Settings of the connector; those of the engine are in ``config``."""

    config: Config
    bidirectional: bool = False
    """``bidirectional_kv_xfer``: a decoder also publishes, so that the next turn's prefill can pull back."""
    recompute_threshold: int = 64
    """``kv_recompute_threshold``: pull back only if it saves at least so many tokens."""
    decoder_lease_s: float = 480.0
    """``decoder_kv_blocks_ttl``: how long a decoder keeps a finished request for the next turn."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> ConnectorOptions:
        """Merge the extra config over the environment.

        Raises:
            ConfigError: a key is unknown, a value malformed, or two keys contradict each other; names them.
        """
        own = {"bidirectional_kv_xfer", "kv_recompute_threshold", "decoder_kv_blocks_ttl"}
        unknown = set(extra) - set(_VARIABLES) - set(_NIXL_NAMES) - own
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config: unknown {sorted(unknown)}; known: "
                f"{', '.join(sorted({*_VARIABLES, *_NIXL_NAMES, *own}))}"
            )
        given = _given(extra)
        overruled = {_VARIABLES[field] for field in given}
        rest = {n: text for n, text in (os.environ if environ is None else environ).items() if n not in overruled}
        return cls(
            config=replace(Config.from_env(rest), **{field: value for field, value in given.items() if value != ""}),
            bidirectional=_flag(extra, "bidirectional_kv_xfer"),
            recompute_threshold=_whole(extra, "kv_recompute_threshold", 64),
            decoder_lease_s=_number(extra, "decoder_kv_blocks_ttl", 480),
        )

    def scheduler_bind(self, data_parallel_index: int) -> Endpoint:
        """Give where the scheduler listens: a fixed port is shifted by the data-parallel rank.

        Raises:
            ConfigError: beyond the last one.
        """
        bind = Endpoint.parse(self.config.bind)
        port = bind.port + data_parallel_index if bind.port else 0
        if port > _LAST_PORT:
            raise ConfigError(f"bind={bind}: no port is left for data-parallel rank {data_parallel_index}")
        return Endpoint(bind.host, port)

    def worker_bind(self) -> str:
        """Give where a worker's mailbox listens: the same host, any port."""
        return str(Endpoint(Endpoint.parse(self.config.bind).host, 0))


def _given(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Read the values that are fields of ``Config``, ``""`` where the default is asked for."""
    given: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key in extra:
        field = _NIXL_NAMES.get(key, key)
        if field not in _VARIABLES:
            continue
        text = _text(extra[key])
        try:
            value = parse_setting(_VARIABLES[field], text) if text else ""
        except ValueError as error:
            raise ConfigError(f"kv_connector_extra_config: {key}: {error}") from None
        first = keys.setdefault(field, key)
        if given.setdefault(field, value) != value:
            raise ConfigError(
                f"kv_connector_extra_config: {first}={extra[first]!r} and {key}={extra[key]!r} are two names of one "
                "setting: give one of them"
            )
    return given


def _text(value: object) -> str:
    """Write a JSON value the way the environment would hold it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def _flag(extra: Mapping[str, Any], key: str) -> bool:
    value = extra.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"kv_connector_extra_config: {key}={value!r} is not true or false")
    return value


def _number(extra: Mapping[str, Any], key: str, default: float) -> float:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"kv_connector_extra_config: {key}={value!r} is not a number from 0")
    return float(value)


def _whole(extra: Mapping[str, Any], key: str, default: int) -> int:
    value = _number(extra, key, default)
    if not value.is_integer():
        raise ConfigError(f"kv_connector_extra_config: {key}={value!r} is not a whole number")
    return int(value)
