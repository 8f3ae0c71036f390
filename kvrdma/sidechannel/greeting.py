"""What a listener says when it is greeted: it names its security mechanism, or it is no ZMQ at all.

ZMQ tells why a handshake ended only if it got as far as comparing mechanisms. A listener that has seen ours
first closes the connection, often before its own has left; this side then sees nothing but the end. So the
question is put once more, by a greeting that stops before the mechanism: the listener answers with its own
and waits. Format: ZMTP 3.1, section 3.1, https://rfc.zeromq.org/spec/37/.
"""

from __future__ import annotations

import socket
import time

from kvrdma.sidechannel.endpoint import Endpoint

_OURS = b"\xff" + bytes(8) + b"\x7f" + b"\x03"
"""Signature and major version."""
_SIGNATURE = slice(0, 10)
_MECHANISM = slice(12, 32)


def mechanism_of(endpoint: Endpoint, timeout_s: float) -> str | None:
    """Ask the listener at ``endpoint`` for its mechanism, ``"NULL"`` or ``"CURVE"``; None if it names none in time."""
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection((endpoint.resolve()[0], endpoint.port), timeout_s) as stream:
            stream.sendall(_OURS)
            greeting = b""
            while len(greeting) < _MECHANISM.stop:
                stream.settimeout(max(0.001, deadline - time.monotonic()))
                part = stream.recv(_MECHANISM.stop - len(greeting))
                if not part:
                    return None
                greeting += part
    except OSError:
        return None
    signature = greeting[_SIGNATURE]
    if signature[:1] != b"\xff" or signature[-1:] != b"\x7f":
        return None
    return greeting[_MECHANISM].rstrip(b"\x00").decode("ascii", "replace")
