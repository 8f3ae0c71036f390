"""Control frames: what they look like, and what is refused before it is decoded."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvrdma import wire
from kvrdma.errors import MessageError, ProtocolVersionError

MESSAGES = [
    wire.OpenLink("t", 1 << 30, require_one_sided=True),
    wire.LinkOpened(3, "host", "0.1.0"),
    wire.DescribeLink(3),
    wire.LinkKeys(b"address", b"key"),
    wire.FillPool(3, 4096),
    wire.PoolFilled(4096),
    wire.CloseLink(0),
    wire.LinkClosed(),
    wire.PullLink(3, b"address", b"key", "contig", (1, 2, 64), 1, 4096, 60.0),
    wire.LinkPulled(1e-6, 1e-3, 2, True, "by hand", ""),
    wire.DescribeHost(),
    wire.HostDescribed(
        "host",
        "0.1.0",
        {"torch": "2"},
        {"t": {"a": "b"}},
        {"u": "no"},
        (wire.NicPort("n", "s", "l", "r", 9000, "g"),),
        {},
    ),
    wire.Failed("ConfigError", "why"),
    wire.StoreOffer(b"family", 1, bytes(64), 20, b"reference", 2.5),
    wire.StoreOffered(accepted=True, missing=2),
    wire.StoreLookup(bytes(32), bytes(64), 20, hold=False),
    wire.StoreFound(2, 20, 7, b"reference"),
    wire.StoreRelease(7),
    wire.AskStore(),
    wire.StoreNumbers("0.1.0", {"blocks": 2.0}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_way(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


def test_a_frame_is_magic_version_and_messagepack() -> None:
    frame = wire.encode(wire.CloseLink(5))
    assert frame[:4] == b"KVCT"
    assert int.from_bytes(frame[4:6], "little") == wire.PROTOCOL_VERSION
    assert msgspec.msgpack.decode(frame[6:]) == {"type": "CloseLink", "link": 5}


def test_every_version_has_its_line_in_the_history() -> None:
    assert wire.__doc__ is not None
    listed = [int(number) for number in re.findall(r"^    (\d+)  ", wire.__doc__, re.MULTILINE)]
    assert listed == list(range(1, wire.PROTOCOL_VERSION + 1))


def test_another_version_is_told_before_the_rest_is_decoded() -> None:
    other = wire.PROTOCOL_VERSION + 1
    frame = b"KVCT" + other.to_bytes(2, "little") + b"\xff not messagepack"
    with pytest.raises(ProtocolVersionError, match=f"protocol {other}, this side {wire.PROTOCOL_VERSION}"):
        wire.decode(frame)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"", "has 0 bytes"),
        (b"KVCT\x01\x00", "has 6 bytes"),
        (b"HTTP/1.1 400 Bad Request", "starts with b'HTTP'"),
        (wire.encode(wire.CloseLink(1))[:-1], "cannot be read"),
        (wire.encode(wire.CloseLink(1)) + b"\x00", "cannot be read"),
        (b"KVCT" + wire.PROTOCOL_VERSION.to_bytes(2, "little") + b"\x91" * 100_000, "cannot be read"),
        (b"KVCT" + wire.PROTOCOL_VERSION.to_bytes(2, "little") + bytes(wire.MAX_FRAME_BYTES), "has 4194310"),
    ],
    ids=["empty", "header only", "foreign", "truncated", "trailing", "deeply nested", "too long"],
)
def test_a_malformed_frame_is_refused(frame: bytes, says: str) -> None:
    with pytest.raises(MessageError, match=re.escape(says)):
        wire.decode(frame)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "NoSuchMessage"},
        {"type": "CloseLink"},
        {"type": "CloseLink", "link": -1},
        {"type": "CloseLink", "link": "1"},
        {"type": "CloseLink", "link": 1, "extra": 1},
        {"type": "FillPool", "link": 1, "generation": 0},
        {"type": "FillPool", "link": 1, "generation": 4097},
        {"type": "OpenLink", "transport": "x" * 257, "pool_nbytes": 1},
    ],
    ids=lambda body: str(body)[:50],
)
def test_a_message_with_wrong_fields_is_refused(body: dict[str, object]) -> None:
    head = b"KVCT" + wire.PROTOCOL_VERSION.to_bytes(2, "little")
    with pytest.raises(MessageError, match="cannot be read"):
        wire.decode(head + msgspec.msgpack.encode(body))


def test_every_single_bit_flip_is_refused_or_another_message() -> None:
    """No flip raises anything but the two errors a listener answers, and none goes unnoticed."""
    message = wire.OpenLink("name", 4096)
    frame = wire.encode(message)
    refused = set()
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert wire.decode(bytes(damaged)) != message
        except (MessageError, ProtocolVersionError):
            refused.add(bit)
    assert refused >= set(range(6 * 8)), "name and version of the protocol"
    assert len(refused) < 8 * len(frame), "in the fields there is room for other values"


@pytest.mark.parametrize(
    ("message", "who"),
    [
        (wire.CloseLink(0), "link tests"),
        (wire.DescribeHost(), "link tests"),
        (wire.AskStore(), "users of a store"),
        (wire.DescribeRanks("engine", ()), "engines"),
        (wire.LinkClosed(), "what is itself an answer"),
        (wire.Failed("ConfigError", "why"), "what is itself an answer"),
    ],
)
def test_who_asks_is_named_without_the_names_of_messages(message: wire.Message, who: str) -> None:
    assert wire.askers_of(message) == who
