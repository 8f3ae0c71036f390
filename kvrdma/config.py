"""Settings from ``KVRDMA_*`` environment variables, as one frozen value.

Nothing is read at import: whoever starts something calls ``Config.from_env()`` and passes the result on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvrdma.errors import ConfigError

SECRET_MIN_CHARS = 16


@dataclass(frozen=True, slots=True)
class Config:
    """What can be set from outside."""

    secret: str | None = None
    """Shared by both sides of every control channel; None: neither encrypted nor checked."""
    control_timeout_s: float = 5.0
    """How long a peer may take to answer a control message."""
    read_timeout_s: float = 60.0
    """How long one read may take."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the variables of ``VARIABLES``; one that is unset or empty keeps its default.

        Raises:
            ConfigError: a value is malformed; names the variable. A secret is not repeated in the message.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for name, (key, parse) in VARIABLES.items():
            text = environ.get(name, "")
            if text:
                try:
                    values[key] = parse(text)
                except ValueError as error:
                    raise ConfigError(f"{name}: {error}") from None
        return cls(**values)


def _secret(text: str) -> str:
    if len(text) < SECRET_MIN_CHARS:
        raise ValueError(
            f"has {len(text)} characters: need at least {SECRET_MIN_CHARS}; "
            "make one with `openssl rand -hex 32`"
        )
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 86400:
        raise ValueError(f"{text!r} is not a number of seconds between 0 and 86400")
    return value


VARIABLES: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "KVRDMA_SECRET": ("secret", _secret),
    "KVRDMA_CONTROL_TIMEOUT_S": ("control_timeout_s", _seconds),
    "KVRDMA_READ_TIMEOUT_S": ("read_timeout_s", _seconds),
}
"""Environment variable: (field of ``Config``, how its text is read)."""
