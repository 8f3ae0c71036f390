"""Framed, checksummed byte strings: what may travel between peers and be handed to native code.

A native library trusts the addresses and keys it is given; a damaged one is an out-of-bounds read there. So
every address and key is sealed here and opened here, and only the payload of an intact one goes further.
"""

from __future__ import annotations

import struct
import zlib

from kvrdma.errors import BlobError

_MAGIC = b"KVRD"
_HEADER = struct.Struct("<4sB15sI")  # magic, version, kind, payload length
_CRC = struct.Struct("<I")

MAX_BLOB_BYTES = 1 << 20


def seal(kind: str, version: int, payload: bytes) -> bytes:
    """Frame ``payload`` as a blob of ``kind`` (ASCII, at most 15 characters, e.g. ``"cma/key"``)."""
    head = _HEADER.pack(_MAGIC, version, kind.encode("ascii"), len(payload))
    return head + payload + _CRC.pack(zlib.crc32(head + payload))


def unseal(kind: str, version: int, blob: bytes) -> bytes:
    """Give the payload of an intact blob of exactly this kind and version.

    Raises:
        BlobError: too short or too long, damaged, of another kind or of another version; the message says
            which, with both values.
    """
    minimum = _HEADER.size + _CRC.size
    if not minimum <= len(blob) <= MAX_BLOB_BYTES:
        raise BlobError(f"{kind} blob has {len(blob)} bytes: need {minimum} to {MAX_BLOB_BYTES}; it was truncated")
    magic, got_version, got_kind, nbytes = _HEADER.unpack_from(blob)
    if magic != _MAGIC:
        raise BlobError(f"{kind} blob starts with {magic!r}, not {_MAGIC!r}: it is not from kvrdma")
    if len(blob) != minimum + nbytes:
        raise BlobError(f"{kind} blob has {len(blob)} bytes where its header says {minimum + nbytes}")
    if zlib.crc32(blob[: -_CRC.size]) != _CRC.unpack_from(blob, len(blob) - _CRC.size)[0]:
        raise BlobError(f"{kind} blob fails its checksum: it was damaged on the way")
    name = got_kind.rstrip(b"\0").decode("ascii", "replace")
    if name != kind:
        raise BlobError(f"blob is of kind {name!r} where {kind!r} is needed: it belongs to another transport")
    if got_version != version:
        raise BlobError(f"{kind} blob has version {got_version}, this side reads {version}: use one kvrdma version")
    return blob[_HEADER.size : -_CRC.size]
