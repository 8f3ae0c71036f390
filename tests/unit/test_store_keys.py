"""Keys: equal prefixes have equal keys, and nothing else has."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3

from kvrdma.errors import ConfigError, PlanError
from kvrdma.store import keys
from kvrdma.store.clients import rendezvous
from kvrdma.store.keys import PrefixKeys, derived_keys, prefix_keys, split_keys

PRINT = b"p" * 32


def make(tokens: list[int], block: int = 4, salt: bytes = b"", fingerprint: bytes = PRINT) -> tuple[bytes, ...]:
    return prefix_keys(fingerprint, tokens, block, salt).keys


def test_a_key_is_the_digest_of_everything_before_it() -> None:
    head = PRINT + (4).to_bytes(8, "little") + (0).to_bytes(8, "little")
    tokens = np.arange(6, dtype="<i8").tobytes()
    assert make(list(range(6))) == (blake3(head + tokens[:32]).digest(), blake3(head + tokens).digest())


def test_equal_prefixes_share_keys_up_to_where_they_differ() -> None:
    one, two = make([1, 2, 3, 4, 5, 6, 7, 8, 9]), make([1, 2, 3, 4, 5, 6, 7, 0, 9])
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])


def test_a_part_of_a_block_is_another_block() -> None:
    assert make([1, 2, 3, 4, 5])[1] != make([1, 2, 3, 4, 5, 0])[1]
    assert len(make([1, 2, 3, 4])) == 1
    assert make([]) == ()


@pytest.mark.parametrize(
    "other",
    [
        make([1, 2, 3, 4], block=2)[1:],
        make([1, 2, 3, 4], salt=b"adapter"),
        make([1, 2, 3, 4], fingerprint=b"q" * 32),
        make([1, 2, 3, 5]),
    ],
    ids=["block size", "salt", "model", "token"],
)
def test_whatever_kv_depends_on_changes_the_key(other: tuple[bytes, ...]) -> None:
    assert make([1, 2, 3, 4])[0] != other[0]


def test_salt_and_tokens_cannot_be_exchanged() -> None:
    eight = (7).to_bytes(8, "little")
    assert make([7, 8], salt=b"") != make([8], salt=eight)


def test_kinds_of_token_lists() -> None:
    expected = make([1, 2, 3])
    assert prefix_keys(PRINT, np.array([1, 2, 3], np.int32), 4).keys == expected
    assert prefix_keys(PRINT, np.array([1, 0, 2, 0, 3], np.int64)[::2], 4).keys == expected
    with pytest.raises(PlanError, match="shape \\(1, 2\\)"):
        prefix_keys(PRINT, np.ones((1, 2), np.int64), 4)
    with pytest.raises(PlanError, match="float64"):
        prefix_keys(PRINT, np.ones(2), 4)
    with pytest.raises(PlanError, match="tokens must be one list of integers, got list"):
        prefix_keys(PRINT, [[1], [2, 3]], 4)  # type: ignore[list-item]
    with pytest.raises(PlanError, match="the salt of a prompt must be bytes, got str"):
        prefix_keys(PRINT, [1], 4, "tenant")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="65537 blocks of 1, more than 65536"):
        prefix_keys(PRINT, np.ones(65537, np.int64), 1)


def test_joined_and_split() -> None:
    made = prefix_keys(PRINT, list(range(10)), 4)
    assert split_keys(made.joined()) == list(made.keys)
    with pytest.raises(PlanError, match="33 bytes"):
        split_keys(bytes(33))
    assert PrefixKeys((), 0, 4).joined() == b""


def test_derived_keys_differ_by_parent_purpose_and_number() -> None:
    made = [*derived_keys(b"a", b"x", 2), *derived_keys(b"b", b"x", 2), *derived_keys(b"a", b"y", 2)]
    assert len(set(made)) == 6


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "blake3", None)
    with pytest.raises(ConfigError, match=r"kvrdma\[store\]"):
        keys.new_hasher()


# Rendezvous hashing


def test_losing_a_store_moves_its_prompts_only() -> None:
    names = [f"store{n}:7480" for n in range(5)]
    prompts = [number.to_bytes(32, "little") for number in range(2000)]
    before = {key: rendezvous(key, names, str) for key in prompts}
    counts = [sum(order[0] == name for order in before.values()) for name in names]
    assert min(counts) > 300
    assert max(counts) < 500
    for key, order in before.items():
        assert rendezvous(key, [name for name in names if name != names[2]], str) == [n for n in order if n != names[2]]
        assert rendezvous(key, names[::-1], str) == order
