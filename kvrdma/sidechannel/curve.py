"""CURVE keys from a shared secret, and the check that a client holds it.

Both key pairs follow from the secret by scrypt, so both sides can compute both public keys: a client talks
only to a server with the secret, and ``admit`` (ZMQ's authentication protocol) lets only such clients in.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from functools import lru_cache

import zmq
from zmq.utils import z85

_ZAP_PUBLIC_KEY = 6


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in ZMQ's Z85 form."""

    public: bytes
    private: bytes


@lru_cache(maxsize=8)
def key_pair(secret: str, side: str) -> KeyPair:
    """Derive the key pair of ``side`` (``"server"`` or ``"client"``); takes about 50 ms, on purpose, the first time."""
    salt = f"kvrdma control channel 1 {side}".encode()
    private = z85.encode(hashlib.scrypt(secret.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=32))
    return KeyPair(zmq.curve_public(private), private)


def admit(request: list[bytes], client_public: bytes) -> list[bytes]:
    """Answer one ZAP request: 200 if it is CURVE with exactly this client key, else 400."""
    version, request_id = ([*request, b"", b""])[:2]
    good = (
        len(request) > _ZAP_PUBLIC_KEY
        and request[5] == b"CURVE"
        and hmac.compare_digest(z85.encode(request[_ZAP_PUBLIC_KEY]), client_public)
    )
    return [version, request_id, b"200" if good else b"400", b"ok" if good else b"unknown key", b"", b""]
