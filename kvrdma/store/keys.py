"""Names of blocks in a store: a block is named by every token from the start of its prompt to its own end.

Key ``i`` is the BLAKE3 digest of the cache's fingerprint, a salt, and all tokens up to the end of block ``i``. Equal
keys therefore mean equal prefixes of the same model, and a prompt that shares a prefix with another shares its keys.
A cryptographic hash: whoever chooses prompts must not be able to choose two with the same key.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrdma.errors import ConfigError, PlanError

KEY_NBYTES = 32
MAX_BLOCKS = (2 << 20) // KEY_NBYTES
"""Of a prompt: what one message carries."""
_LENGTHS = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """The keys of a prompt's blocks; the last block may be filled in part."""

    keys: tuple[bytes, ...]
    num_tokens: int
    block_tokens: int

    def joined(self) -> bytes:
        """Give all keys as one byte string, ``KEY_NBYTES`` each."""
        return b"".join(self.keys)


def prefix_keys(
    fingerprint: bytes, tokens: Sequence[int] | np.ndarray[Any, Any], block_tokens: int, salt: bytes = b""
) -> PrefixKeys:
    """Make the keys of a prompt.

    Args:
        fingerprint: of the cache, see ``geometry.fingerprint``.
        tokens: one-dimensional integers; token ids below 2**63.
        block_tokens: tokens of a block, 1 or more.
        salt: whatever else the KV depends on: an adapter, images, a tenant.

    Returns:
        One key per block, the last for what is left; none without tokens.

    Raises:
        PlanError: the tokens are no list of integers, or too many for one message, or the salt is not bytes.
    """
    if not isinstance(salt, bytes):
        raise PlanError(f"the salt of a prompt must be bytes, got {type(salt).__name__}")
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged, or a tensor that no array can be made of
        raise PlanError(f"tokens must be one list of integers, got {type(tokens).__name__}: {error}") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise PlanError(f"tokens must be one list of integers, got shape {ids.shape} of {ids.dtype}")
    count = -(-len(ids) // block_tokens)
    if count > MAX_BLOCKS:
        raise PlanError(
            f"a prompt of {len(ids)} tokens has {count} blocks of {block_tokens}, more than {MAX_BLOCKS}: "
            "use larger store blocks"
        )
    raw = memoryview(np.ascontiguousarray(ids, "<i8").tobytes())
    hasher = new_hasher()(fingerprint + _LENGTHS.pack(block_tokens, len(salt)) + salt)
    step, keys = 8 * block_tokens, []
    for start in range(0, len(raw), step):
        hasher.update(raw[start : start + step])
        keys.append(hasher.digest())
    return PrefixKeys(tuple(keys), len(ids), block_tokens)


def derived_keys(parent: bytes, purpose: bytes, count: int) -> tuple[bytes, ...]:
    """Make keys for ``count`` pieces of something that belongs to the prompt whose last key is ``parent``."""
    hasher = new_hasher()
    head = purpose + b"\0" + parent
    return tuple(hasher(head + struct.pack("<Q", number)).digest() for number in range(count))


def split_keys(joined: bytes) -> list[bytes]:
    """Take apart what ``PrefixKeys.joined`` made.

    Raises:
        PlanError: its length is no multiple of a key's.
    """
    if len(joined) % KEY_NBYTES:
        raise PlanError(f"{len(joined)} bytes of keys are no multiple of {KEY_NBYTES}")
    keys: list[bytes] = np.frombuffer(joined, f"V{KEY_NBYTES}").tolist()
    return keys


def new_hasher() -> Callable[[bytes], Any]:
    """Give the hash function's constructor.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        from blake3 import blake3
    except ImportError as error:
        raise ConfigError(f"a KV store needs the package blake3: pip install 'kvrdma[store]' ({error})") from None
    return blake3
