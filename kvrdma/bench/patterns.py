"""What a benchmark reads: block patterns, and bytes that tell where they came from.

A pool is ``layers x 2 * blocks`` blocks of ``block_bytes``; a case reads ``blocks`` of them in every layer,
the same block ids in each, as a request's KV cache lies. Every 8-byte word of a producer's pool is its *tag*,

    word = (generation << 48 | position of the word in the pool) * ODD   (mod 2**64)

which is invertible: a wrong word names the place and generation it was written for. A consumer's pool is
poison before a read, so bytes that should not have changed are checked as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvrdma.errors import ConfigError
from kvrdma.rows import Rows

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint64]
Ids: TypeAlias = npt.NDArray[np.int64]

PATTERNS = ("contig", "fragmented", "remote_contig")
POISON = 0xA5
POOL_RATIO = 2
"""Blocks of a pool per block read, so that no draw of blocks can be dense."""

_POISON_WORD = np.uint64(0xA5A5A5A5A5A5A5A5)
_ODD = 0x9E3779B97F4A7C15
_ODD_INVERSE = pow(_ODD, -1, 1 << 64)
_CHUNK_BYTES = 512 << 10
"""What fits into a core's cache with its expectation beside it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is read: ``blocks`` blocks of ``block_bytes`` in each of ``layers`` layers."""

    layers: int
    blocks: int
    block_bytes: int

    def __post_init__(self) -> None:
        if min(self.layers, self.blocks) < 1 or self.block_bytes < 8 or self.block_bytes % 8:
            raise ConfigError(
                f"{self.layers} layers of {self.blocks} blocks of {self.block_bytes} bytes: need at least "
                "one layer and block, and a block size that is a positive multiple of 8"
            )

    @property
    def rows(self) -> int:
        """Rows of one read."""
        return self.layers * self.blocks

    @property
    def nbytes(self) -> int:
        """Bytes of one read."""
        return self.rows * self.block_bytes

    @property
    def pool_blocks(self) -> int:
        """Blocks per layer in either pool."""
        return POOL_RATIO * self.blocks

    @property
    def pool_nbytes(self) -> int:
        """Bytes of either pool."""
        return POOL_RATIO * self.nbytes


@dataclass(frozen=True, slots=True)
class Case:
    """One pattern over one shape; ``seed`` decides which blocks are drawn."""

    pattern: str
    shape: Shape
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first place where bytes are wrong; offsets count from the start of the pools."""

    row: int | None
    """Index in ``rows_of``; None where bytes changed that no row covers."""
    local_offset: int
    remote_offset: int | None
    expected: int
    found: int
    late: bool = False
    """Whether it was wrong when the read was reported done, and right a moment later."""

    def __str__(self) -> str:
        what = f"row {self.row}" if self.row is not None else "memory outside every row"
        if self.late:
            what = f"the read was reported done before all bytes were there: {what}"
        source = f" (remote byte {self.remote_offset})" if self.remote_offset is not None else ""
        return (
            f"{what} is wrong at local byte {self.local_offset}{source}: "
            f"expected {describe_word(self.expected)}, found {describe_word(self.found)}"
        )


def block_ids(case: Case) -> tuple[Ids, Ids]:
    """Draw the local and the remote block of every pair, in the order they are read.

    ``contig``: block i to block i. ``fragmented``: distinct blocks of a pool twice as large, at random on
    each side independently, so that neither merging nor sorting helps. ``remote_contig``: the remote blocks
    ascending and adjacent, the local ones fragmented.

    Raises:
        ConfigError: the pattern is unknown.
    """
    blocks, pool = case.shape.blocks, case.shape.pool_blocks
    rng = np.random.default_rng(case.seed)
    in_order = np.arange(blocks)
    if case.pattern == "contig":
        return in_order, in_order
    if case.pattern == "remote_contig":
        return rng.permutation(pool)[:blocks], in_order
    if case.pattern == "fragmented":
        return rng.permutation(pool)[:blocks], rng.permutation(pool)[:blocks]
    raise ConfigError(f"pattern {case.pattern!r} is unknown: use {', '.join(PATTERNS)}")


def rows_of(case: Case, local_addr: int, region: int = 0) -> Rows:
    """Lay the case out as rows, layer by layer, for a local pool at ``local_addr`` and one remote region."""
    local, remote = block_ids(case)
    shape = case.shape
    rows = np.empty((shape.layers, shape.blocks, 4), np.uint64)
    starts = np.arange(shape.layers)[:, None] * shape.pool_blocks
    rows[..., 0] = local_addr + (starts + local) * shape.block_bytes
    rows[..., 1] = region
    rows[..., 2] = (starts + remote) * shape.block_bytes
    rows[..., 3] = shape.block_bytes
    return rows.reshape(-1, 4)


def tags(generation: int, first_word: int, count: int) -> npt.NDArray[np.uint64]:
    """Compute the words ``[first_word, first_word + count)`` of a pool of this generation (1 to 65535)."""
    words = np.arange(first_word, first_word + count, dtype=np.uint64)
    return (words | np.uint64(generation << 48)) * np.uint64(_ODD)


def _step(words: int) -> np.uint64:
    """What tags grow by from a word to that many words further: they are linear below word 2**48."""
    return np.uint64(words * _ODD % (1 << 64))


def describe_word(word: int) -> str:
    """Say where a word comes from: poison, a tag, or neither."""
    if word == int(_POISON_WORD):
        return f"{word:#018x} (poison: nothing was written)"
    origin = word * _ODD_INVERSE % (1 << 64)
    generation, position = origin >> 48, origin & ((1 << 48) - 1)
    if 1 <= generation <= 4096 and position < 1 << 40:
        return f"{word:#018x} (remote byte {position * 8}, generation {generation})"
    return f"{word:#018x} (of unknown origin)"


def fill(pool: Bytes, generation: int) -> None:
    """Write this generation's tags over a producer's pool (a multiple of 8 bytes)."""
    words = pool.view(np.uint64)
    step = _CHUNK_BYTES // 8
    first = tags(generation, 0, min(step, len(words)))
    for start in range(0, len(words), step):
        part = words[start : start + step]
        np.add(first[: len(part)], _step(start), out=part)


def find_mismatch(pool: Bytes, case: Case, generation: int) -> Mismatch | None:
    """Compare a whole consumer's pool with what a read of ``case`` must have left in it.

    Args:
        pool: all bytes of the pool, poisoned before the read; it may be larger than the case needs.
        case: what was read.
        generation: of the producer's pool during the read.

    Returns:
        The first wrong word, rows first; None if every byte is right, inside the rows and around them.
    """
    shape = case.shape
    words = pool[: shape.pool_nbytes].view(np.uint64).reshape(shape.layers * shape.pool_blocks, -1)
    local, remote = block_ids(case)
    starts = (np.arange(shape.layers) * shape.pool_blocks)[:, None]
    local_rows, remote_rows = (starts + local).ravel(), (starts + remote).ravel()
    found = _wrong_row(words, local_rows, remote_rows, generation)
    untouched = np.ones(len(words), np.bool_)
    untouched[local_rows] = False
    return found or _wrong_outside(words, np.flatnonzero(untouched)) or _wrong_beyond(pool, shape.pool_nbytes)


def end_words(case: Case) -> tuple[Ids, Ids]:
    """Give the positions of each row's last and first word in the local and in the remote pool, last rows first."""
    shape = case.shape
    width = shape.block_bytes // 8
    starts = (np.arange(shape.layers) * shape.pool_blocks)[:, None]
    ends = np.array([width - 1, 0])
    local, remote = (((starts + ids).ravel()[::-1, None] * width + ends).ravel() for ids in block_ids(case))
    return local, remote


def find_late(seen: npt.NDArray[np.uint64], case: Case, generation: int) -> Mismatch | None:
    """Compare what was in the local ``end_words`` when a read was reported done with what must be in them."""
    local, remote = end_words(case)
    expected = (remote.astype(np.uint64) | np.uint64(generation << 48)) * np.uint64(_ODD)
    wrong = np.flatnonzero(expected != seen)
    if not len(wrong):
        return None
    at = int(wrong[0])
    row = case.shape.rows - 1 - at // 2
    return Mismatch(row, 8 * int(local[at]), 8 * int(remote[at]), int(expected[at]), int(seen[at]), late=True)


def _chunks(count: int, words_each: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // (8 * words_each))
    return (slice(start, start + step) for start in range(0, count, step))


def _wrong_row(words: npt.NDArray[np.uint64], local: Ids, remote: Ids, generation: int) -> Mismatch | None:
    width = words.shape[1]
    first = tags(generation, 0, width)
    begins = remote.astype(np.uint64) * _step(width)
    for part in _chunks(len(local), width):
        expected, found = begins[part, None] + first, words[local[part]]
        if np.array_equal(expected, found):
            continue
        row, word = (int(i) for i in np.argwhere(expected != found)[0])
        index = part.start + row
        return Mismatch(
            row=index,
            local_offset=8 * (int(local[index]) * width + word),
            remote_offset=8 * (int(remote[index]) * width + word),
            expected=int(expected[row, word]),
            found=int(found[row, word]),
        )
    return None


def _wrong_outside(words: npt.NDArray[np.uint64], blocks: Ids) -> Mismatch | None:
    width = words.shape[1]
    for part in _chunks(len(blocks), width):
        found = words[blocks[part]]
        if (found == _POISON_WORD).all():
            continue
        row, word = (int(i) for i in np.argwhere(found != _POISON_WORD)[0])
        offset = 8 * (int(blocks[part.start + row]) * width + word)
        return Mismatch(None, offset, None, int(_POISON_WORD), int(found[row, word]))
    return None


def _wrong_beyond(pool: Bytes, start: int) -> Mismatch | None:
    """Look for changes behind the part of the pool that the case uses."""
    step = _CHUNK_BYTES
    for begin in range(start, len(pool), step):
        part = pool[begin : begin + step].view(np.uint64)
        if (part == _POISON_WORD).all():
            continue
        word = int(np.flatnonzero(part != _POISON_WORD)[0])
        return Mismatch(None, begin + 8 * word, None, int(_POISON_WORD), int(part[word]))
    return None
