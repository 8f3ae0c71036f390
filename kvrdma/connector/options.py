"""What a user can set: ``KVRDMA_*`` variables and ``kv_connector_extra_config``, which wins."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrdma.config import VARIABLES, Config
from kvrdma.errors import ConfigError
from kvrdma.sidechannel import Endpoint

_LAST_PORT = 65535
_ENV_ONLY = {"secret"}
"""Would show in process lists and logs."""
_NIXL_NAMES = {"kv_lease_duration": "lease_s", "engine_ttl": "peer_idle_s"}
"""NixlConnector's names for settings of ours."""


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
            ConfigError: a key is unknown, or a value malformed; names it.
        """
        fields = {field: name for name, (field, _) in VARIABLES.items() if field not in _ENV_ONLY}
        own = {"bidirectional_kv_xfer", "kv_recompute_threshold", "decoder_kv_blocks_ttl"}
        unknown = set(extra) - set(fields) - set(_NIXL_NAMES) - own
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config: unknown {sorted(unknown)}; known: "
                f"{', '.join(sorted({*fields, *_NIXL_NAMES, *own}))}"
            )
        merged = dict(os.environ if environ is None else environ)
        for key, value in extra.items():
            field = _NIXL_NAMES.get(key, key)
            if field in fields:
                merged[fields[field]] = _text(value)
        return cls(
            config=Config.from_env(merged),
            bidirectional=_flag(extra, "bidirectional_kv_xfer"),
            recompute_threshold=int(_number(extra, "kv_recompute_threshold", 64)),
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


def _text(value: object) -> str:
    """Write a JSON value the way the environment would hold it."""
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
