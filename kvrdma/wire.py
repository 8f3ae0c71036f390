"""Every control message, and how it becomes a frame and back.

A frame is ``b"KVCT"``, the protocol version (2 bytes, little endian) and the message in MessagePack. The
version is checked before the rest is decoded, so that two versions can always tell each other apart. No
message makes the receiver execute or import anything.

History of ``PROTOCOL_VERSION``:
    1  link test: ``OpenLink``, ``DescribeLink``, ``FillPool``, ``CloseLink``, ``PullLink``, ``DescribeHost`` and
       their answers; ``Failed``.
       Engines: ``DescribeRanks``, ``AnnounceRank``, ``LeaseDone``, ``Heartbeat``, ``Goodbye``, ``DigestRows``
       and their answers. Store: ``StoreOffer``, ``StoreLookup``, ``StoreRelease``, ``AskStore`` and their answers.
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
Small: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Generation: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Keys: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=2 << 20)]
"""32 bytes per block of a prompt."""


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


class PullLink(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Read in the other direction: from the asker's pool into the link's, and verify."""

    link: Count
    address: Blob
    key: Blob
    pattern: Name
    shape: tuple[Small, Small, Small]
    """Layers, blocks, bytes of a block (``kvrdma.bench.patterns.Shape``)."""
    seed: Count
    generation: Generation
    """Of the tags in the asker's pool."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]


class LinkPulled(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The read in the other direction has ended."""

    blocking_s: float
    total_s: float
    rows_posted: Count
    one_sided: bool
    via: Name
    mismatch: Text
    """Empty: every byte was right."""


class DescribeHost(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask a link test's peer what host it is on (`kvrdma doctor --peer`)."""


class NicPort(msgspec.Struct, frozen=True, array_like=True):
    """One port of an RDMA NIC, for people."""

    name: Name
    state: Name
    layer: Name
    rate: Name
    mtu: Count
    """Of its network device, in bytes; 0: unknown."""
    gids: Name


class HostDescribed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What the peer runs with."""

    host: Name
    kvrdma: Name
    versions: Annotated[dict[Name, Name], msgspec.Meta(max_length=64)]
    transports: Annotated[dict[Name, dict[Name, Text]], msgspec.Meta(max_length=64)]
    """What each transport says of itself."""
    refused: Annotated[dict[Name, Text], msgspec.Meta(max_length=64)]
    """Why others cannot be opened there."""
    ports: Annotated[tuple[NicPort, ...], msgspec.Meta(max_length=256)]
    mtus: Annotated[dict[Name, Count], msgspec.Meta(max_length=256)]
    """Of its network devices, in bytes."""


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The request failed; ``error`` is the class name in ``kvrdma.errors``."""

    error: Name
    message: Text


RankPair: TypeAlias = tuple[Small, Small]
"""(pipeline stage, rank in it)."""
Lease: TypeAlias = tuple[Count, Count]
"""(slot, generation)."""


class TransportOffer(msgspec.Struct, frozen=True, array_like=True):
    """How one transport reads one rank: its address, and the keys of its regions, the fence table last."""

    address: Blob
    keys: Annotated[tuple[Blob, ...], msgspec.Meta(max_length=4096)]


class RankDescription(msgspec.Struct, frozen=True, array_like=True):
    """Everything a consumer needs to know of one rank, before it reads from it."""

    engine_id: Name
    generation: Count
    """Of the engine: another one after every start, and after that of any of its ranks."""
    rank: RankPair
    host: Name
    """With ``port``: the rank's mailbox."""
    port: Port
    model: dict[Name, Name]
    """What has to be equal on both sides, field by field."""
    layout: Blob
    """The rank's ``KVLayout``, MessagePack, compressed with zlib."""
    offers: dict[Name, TransportOffer]
    kvrdma: Name = ""
    """Version, for people."""
    start: Count = 0
    """Of the rank's process: another one after every start."""
    sizes: dict[Name, Small] = {}
    """How the engine is split; what a reference says has to be the same."""


class DescribeRanks(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask an engine for the descriptions of some of its ranks."""

    engine_id: Name
    ranks: Annotated[tuple[RankPair, ...], msgspec.Meta(max_length=4096)]


class RanksDescribed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The descriptions, in the order asked for."""

    ranks: Annotated[tuple[RankDescription, ...], msgspec.Meta(max_length=4096)]


class AnnounceRank(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Tell the engine's side channel about a rank that lives in another process."""

    rank: RankDescription


class RankAnnounced(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The rank is known now; references name this generation of the engine."""

    generation: Count
    ranks: Count
    """How many are known."""


class LeaseDone(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A consumer rank needs a lease no longer, whether its pull succeeded or not."""

    lease: Lease
    consumer: Name
    rank: Small
    readers: Annotated[tuple[Small, ...], msgspec.Meta(max_length=4096)]
    """Every rank of that consumer that reads this producer rank."""
    succeeded: bool = True


class Heartbeat(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A consumer still needs these leases."""

    leases: Annotated[tuple[Lease, ...], msgspec.Meta(max_length=65536)]


class Goodbye(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A consumer rank closes: whatever it still reads, it is done with."""

    consumer: Name
    rank: Small


class DigestRows(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask for the checksums of bytes a pull has read, while its lease lives (``verify="digest"``)."""

    lease: Lease
    rows: Annotated[bytes, msgspec.Meta(max_length=3 << 20)]
    """``(N, 3)`` uint64, little endian: region, offset, length."""


class RowDigests(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """CRC-32 of each row, ``(N,)`` uint32, little endian."""

    digests: Annotated[bytes, msgspec.Meta(max_length=3 << 20)]


class Noted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The message was received; ``known`` says how many of the leases it named are live."""

    known: Count = 0


class StoreOffer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Offer a store the blocks of a prompt: it reads them from the sender, until the sender's lease ends."""

    family: Blob
    """Which caches they belong to: ``kvrdma.store.geometry.Family``, MessagePack."""
    rank: Small
    """Which share of the kv heads they hold."""
    keys: Keys
    """Of all blocks of the prompt, from its first."""
    num_tokens: Count
    reference: Blob
    """``PullReference.to_params()``, MessagePack."""
    within_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    """The sender takes the blocks back after that."""


class StoreOffered(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What a store makes of an offer; if it accepts, the sender's lease ends once it has read."""

    accepted: bool
    missing: Small
    """Blocks of the offer that are not in the store, as far as it knows without looking closer."""
    reason: Text = ""


class StoreLookup(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask a store how much of a prompt it has from its start on, and hold that for reading."""

    fingerprint: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    keys: Keys
    num_tokens: Count
    hold: bool = True


class StoreFound(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first ``blocks`` blocks, ``tokens`` tokens, are there; a reference to them if they are held."""

    blocks: Small
    tokens: Count
    lease: Count = 0
    reference: Blob = b""


class StoreRelease(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What a lookup holds is needed no longer."""

    lease: Count


class AskStore(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ask a store for its numbers."""


class StoreNumbers(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Its counts since the start and what it holds; bytes and seconds."""

    kvrdma: Name
    numbers: dict[Name, float]


Message: TypeAlias = (
    OpenLink
    | LinkOpened
    | DescribeLink
    | LinkKeys
    | FillPool
    | PoolFilled
    | CloseLink
    | LinkClosed
    | PullLink
    | LinkPulled
    | DescribeHost
    | HostDescribed
    | Failed
    | DescribeRanks
    | RanksDescribed
    | AnnounceRank
    | RankAnnounced
    | LeaseDone
    | Heartbeat
    | Goodbye
    | DigestRows
    | RowDigests
    | Noted
    | StoreOffer
    | StoreOffered
    | StoreLookup
    | StoreFound
    | StoreRelease
    | AskStore
    | StoreNumbers
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
        raise MessageError(f"control frame has {len(frame)} bytes: need {_HEADER.size + 1} to {MAX_FRAME_BYTES}")
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


def askers_of(message: Message) -> str:
    """Name for people who sends such a message."""
    if isinstance(message, OpenLink | DescribeLink | FillPool | CloseLink | PullLink | DescribeHost):
        return "link tests"
    if isinstance(message, StoreOffer | StoreLookup | StoreRelease | AskStore):
        return "users of a store"
    asks = isinstance(message, DescribeRanks | AnnounceRank | LeaseDone | Heartbeat | Goodbye | DigestRows)
    return "engines" if asks else "what is itself an answer"


_decoder = msgspec.msgpack.Decoder(Message)
