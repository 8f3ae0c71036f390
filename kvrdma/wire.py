"""Every control message, and how it becomes a frame and back.

A frame is ``b"KVCT"``, the protocol version (2 bytes, little endian) and the message in MessagePack. The
version is checked before the rest is decoded, so that two versions can always tell each other apart. No
message makes the receiver execute or import anything.

History of ``PROTOCOL_VERSION``:
    1  link test: ``OpenLink``, ``DescribeLink``, ``FillPool``, ``CloseLink`` and their answers; ``Failed``.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec

from kvrdma.errors import MessageError, ProtocolVersionError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 4 << 20

_HEADER = struct.Struct("<4sH")
_MAGIC = b"KVCT"

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=16384)]
Blob: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Generation: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class OpenLink(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Open a transport, allocate a pool and make it readable."""

    transport: Name
    pool_nbytes: Count
    require_one_sided: bool = False


class LinkOpened(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The link is open; nothing of it was exchanged yet."""

    link: Count
    """Names this link in later messages."""
    host: Name
    kvrdma: Name
    """The peer's version, for people."""


class DescribeLink(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask for what ``Transport.connect`` needs."""

    link: Count


class LinkKeys(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The transport's address and the pool's key."""

    address: Blob
    key: Blob


class FillPool(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Write a new generation of tags over the link's pool (``kvrdma.bench.patterns``)."""

    link: Count
    generation: Generation


class PoolFilled(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The pool holds that generation now."""

    generation: Generation


class CloseLink(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Close the link's transport and free its pool; harmless if there is no such link."""

    link: Count


class LinkClosed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The link is closed."""


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The request failed; ``error`` is the class name in ``kvrdma.errors``."""

    error: Name
    message: Text


Message: TypeAlias = (
    OpenLink | LinkOpened | DescribeLink | LinkKeys | FillPool | PoolFilled | CloseLink | LinkClosed | Failed
)


def encode(message: Message) -> bytes:
    """Turn a message into a frame."""
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION) + msgspec.msgpack.encode(message)


def decode(frame: bytes) -> Message:
    """Turn a frame into a message.

    Raises:
        ProtocolVersionError: the sender speaks another version; names both.
        MessageError: too long or short, not from kvrdma, or not a known message with values in range.
    """
    if not _HEADER.size < len(frame) <= MAX_FRAME_BYTES:
        raise MessageError(
            f"control frame has {len(frame)} bytes: need {_HEADER.size + 1} to {MAX_FRAME_BYTES}"
        )
    magic, version = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise MessageError(f"control frame starts with {magic!r}, not {_MAGIC!r}: it is not from kvrdma")
    if version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"the other side speaks control protocol {version}, this side {PROTOCOL_VERSION}: "
            "install the same kvrdma on both"
        )
    try:
        return _decoder.decode(frame[_HEADER.size :])
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(f"control message cannot be read: {error}") from None


_decoder = msgspec.msgpack.Decoder(Message)
