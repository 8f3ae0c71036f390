"""Settings from ``KVRDMA_*`` environment variables, as one frozen value.

Nothing is read at import: whoever starts something calls ``Config.from_env()`` and passes the result on.
"""

from __future__ import annotations

import difflib
import ipaddress
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from kvrdma.errors import ConfigError

SECRET_MIN_CHARS = 16
_PREFIX = "KVRDMA_"
_HOST_AND_PORT = re.compile(r"(?:\[(?P<six>[^\]\s]*:[^\]\s]*)\]|(?P<host>[^:/\[\]\s]+)):(?P<port>[0-9]{1,5})")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Config:
    """What can be set from outside. A value that cannot be used raises ``ConfigError``, which names the field."""

    secret: str | None = field(default=None, repr=False)
    """Shared by both sides of every control channel; None: neither encrypted nor checked."""
    control_timeout_s: float = 5.0
    """How long a peer may take to answer a control message."""
    read_timeout_s: float = 60.0
    """How long one read of a link test may take."""
    bind: str = "127.0.0.1:0"
    """Where an engine's side channel and mailbox listen, ``HOST:PORT``; port 0 picks a free one."""
    advertise: str | None = None
    """The host that peers are told; None: the host of ``bind``."""
    insecure: bool = False
    """Listen beyond loopback without a secret."""
    allow_peers: tuple[str, ...] = ()
    """Hosts and networks (CIDR) that may be pulled from; empty: all. References pass through clients."""
    transports: tuple[str, ...] = ()
    """Transports to use, best first, one-sided ones before others; empty: all that work here, chosen per peer."""
    require_one_sided: bool = False
    """Refuse peers whose CPU would have to serve the reads."""
    pull_timeout_s: float = 60.0
    """From ``pull`` to its end, retries included."""
    lease_s: float = 30.0
    """How long the producer holds blocks without hearing from a consumer."""
    fence_slots: int = 4096
    """Leases at the same time."""
    breaker_threshold: int = 3
    """Consecutive failures of a peer after which pulls from it fail at once."""
    breaker_cooldown_s: float = 10.0
    """For how long."""
    peer_idle_s: float = 3600.0
    """How long the connection to a peer is kept without use."""
    verify: str = "none"
    """``digest``: compare every row with a checksum made by the producer. For debugging links: it is slow."""

    def __post_init__(self) -> None:
        """Check every field."""
        for name, check in _CHECKS.items():
            try:
                check(getattr(self, name))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{name}: {error}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the variables of ``VARIABLES``; one that is unset or empty keeps its default.

        Raises:
            ConfigError: a value is malformed; names the variable. A secret is not repeated in the message.
        """
        environ = os.environ if environ is None else environ
        for name in unknown_settings(environ):
            _warn_unknown(name)
        values: dict[str, Any] = {}
        for name, (key, _) in VARIABLES.items():
            text = environ.get(name, "")
            if text:
                try:
                    values[key] = parse_setting(name, text)
                except ValueError as error:
                    raise ConfigError(f"{name}: {error}") from None
        return cls(**values)


def parse_setting(name: str, text: str) -> Any:  # noqa: ANN401 - what the field holds
    """Read the text of a variable of ``VARIABLES``.

    Raises:
        ValueError: it is malformed or out of range; names no variable, for the text may have come from elsewhere.
    """
    field_name, parse = VARIABLES[name]
    value = parse(text)
    _CHECKS[field_name](value)
    return value


def unknown_settings(environ: Mapping[str, str]) -> list[str]:
    """List variables that look like settings and are none: a misspelt one would silently change nothing.

    ``KVRDMA_<TRANSPORT>_*`` are read by transports.
    """
    others = tuple(f"{_PREFIX}{name.upper()}_" for name in _transport_names())
    return [
        name for name in environ if name.startswith(_PREFIX) and name not in VARIABLES and not name.startswith(others)
    ]


@lru_cache(maxsize=1)
def _transport_names() -> tuple[str, ...]:
    return tuple(point.name for point in entry_points(group="kvrdma.transports"))


@lru_cache(maxsize=256)  # once a process
def _warn_unknown(name: str) -> None:
    near = difflib.get_close_matches(name, VARIABLES, 1)
    _log.warning("%s is no setting of kvrdma%s", name, f": did you mean {near[0]}?" if near else "")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {_SECONDS}") from None


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ValueError(f"{text!r} names nothing; unset it for all")
    return words


def _flag(text: str) -> bool:
    if text.lower() not in {"0", "1", "false", "true"}:
        raise ValueError(f"{text!r} is not 0, 1, false or true")
    return text.lower() in {"1", "true"}


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not {_COUNT}")
    return int(text)


VARIABLES: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "KVRDMA_SECRET": ("secret", str),
    "KVRDMA_CONTROL_TIMEOUT_S": ("control_timeout_s", _seconds),
    "KVRDMA_READ_TIMEOUT_S": ("read_timeout_s", _seconds),
    "KVRDMA_BIND": ("bind", str),
    "KVRDMA_ADVERTISE": ("advertise", str),
    "KVRDMA_INSECURE": ("insecure", _flag),
    "KVRDMA_ALLOW_PEERS": ("allow_peers", _words),
    "KVRDMA_TRANSPORTS": ("transports", _words),
    "KVRDMA_REQUIRE_ONE_SIDED": ("require_one_sided", _flag),
    "KVRDMA_PULL_TIMEOUT_S": ("pull_timeout_s", _seconds),
    "KVRDMA_LEASE_S": ("lease_s", _seconds),
    "KVRDMA_FENCE_SLOTS": ("fence_slots", _count),
    "KVRDMA_BREAKER_THRESHOLD": ("breaker_threshold", _count),
    "KVRDMA_BREAKER_COOLDOWN_S": ("breaker_cooldown_s", _seconds),
    "KVRDMA_PEER_IDLE_S": ("peer_idle_s", _seconds),
    "KVRDMA_VERIFY": ("verify", str),
}
"""Environment variable: (field of ``Config``, how its text is read)."""

_SECONDS = "a number of seconds between 0 and 86400"
_COUNT = f"a whole number between 1 and {1 << 20}"


def _check_secret(value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"is a {type(value).__name__}, not a text")
    if isinstance(value, str) and len(value) < SECRET_MIN_CHARS:
        raise ValueError(
            f"has {len(value)} characters: need at least {SECRET_MIN_CHARS}; make one with `openssl rand -hex 32`"
        )


def _check_seconds(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86400:
        raise ValueError(f"{value!r} is not {_SECONDS}")


def _check_count(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 1 << 20:
        raise ValueError(f"{value!r} is not {_COUNT}")


def _check_flag(value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")


def _check_text(value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")


def host_and_port(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``; an IPv6 address is written in brackets, ``[::1]:7000``.

    Raises:
        ValueError: anything else; repeats it, but names no setting.
    """
    match = _HOST_AND_PORT.fullmatch(text)
    if not match or int(match["port"]) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT with a port up to 65535 (IPv6 in brackets: [::1]:7000)")
    return match["six"] or match["host"], int(match["port"])


def _check_bind(value: object) -> None:
    _check_text(value)
    host_and_port(str(value))


def _check_words(value: object) -> None:
    if not isinstance(value, tuple | list) or not all(isinstance(word, str) and word for word in value):
        raise ValueError(f"{value!r} is not a tuple of names")
    if len(set(value)) < len(value):
        raise ValueError(f"{', '.join(value)} names one of them twice")


def _check_peers(value: object) -> None:
    _check_words(value)
    for word in value:  # type: ignore[attr-defined]
        if "/" in word or ":" in word:
            ipaddress.ip_network(word, strict=False)  # says what is wrong


def _check_host(value: object) -> None:
    if value is None:
        return
    _check_text(value)
    if not str(value).strip() or "/" in str(value):
        raise ValueError(f"{value!r} is not a host")
    if ":" in str(value):
        ipaddress.ip_address(str(value).partition("%")[0])  # no port: says that this is no address


def _check_verify(value: object) -> None:
    if value not in {"none", "digest"}:
        raise ValueError(f"{value!r} is not none or digest")


_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "secret": _check_secret,
    "control_timeout_s": _check_seconds,
    "read_timeout_s": _check_seconds,
    "bind": _check_bind,
    "advertise": _check_host,
    "insecure": _check_flag,
    "allow_peers": _check_peers,
    "transports": _check_words,
    "require_one_sided": _check_flag,
    "pull_timeout_s": _check_seconds,
    "lease_s": _check_seconds,
    "fence_slots": _check_count,
    "breaker_threshold": _check_count,
    "breaker_cooldown_s": _check_seconds,
    "peer_idle_s": _check_seconds,
    "verify": _check_verify,
}
"""Field of ``Config``: raises ``TypeError`` or ``ValueError`` for what it cannot hold, wherever that comes from."""
