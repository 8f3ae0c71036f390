"""Where a control channel listens or is reached."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from kvrdma.config import host_and_port
from kvrdma.errors import ConfigError, UnreachableError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or address) and a TCP port; port 0 lets a server choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read ``HOST:PORT``; an IPv6 address is written in brackets, ``[::1]:7000``.

        Raises:
            ConfigError: anything else.
        """
        try:
            return cls(*host_and_port(text))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def resolve(self) -> tuple[str, ...]:
        """Look the host up; give its addresses, IPv4 first.

        Raises:
            UnreachableError: the name is unknown.
        """
        try:
            found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter: a label that is too long, empty or no text
            why = error.strerror if isinstance(error, OSError) else error
            raise UnreachableError(f"host {self.host!r} cannot be looked up: {why}") from error
        addresses = {str(item[4][0]) for item in found}
        return tuple(sorted(addresses, key=lambda text: (":" in text, text)))

    def is_loopback(self) -> bool:
        """Tell whether only this host can reach it."""
        return all(ipaddress.ip_address(text.partition("%")[0]).is_loopback for text in self.resolve())

    def as_told(self, host: str | None) -> Endpoint:
        """Give the endpoint that others are told: the same port of ``host``, of this host by default.

        Raises:
            ConfigError: it is that of every address, which leads others to themselves.
        """
        told = Endpoint(host or self.host, self.port)
        if told.host in {"0.0.0.0", "::"}:  # noqa: S104 - this refuses it
            raise ConfigError(
                f"{told} is no address that others can reach: say which one is (--advertise, KVRDMA_ADVERTISE)"
            )
        return told

    def url(self) -> str:
        """Give the ZMQ URL, with the host looked up."""
        address = self.resolve()[0]
        return f"tcp://[{address}]:{self.port}" if ":" in address else f"tcp://{address}:{self.port}"
