"""Pairs local and remote token slots by absolute position, for any block sizes and token shares.

A rank stores its positions in order, so its ``q``-th token is in page ``q // tokens``, slot ``q % tokens``.
With dcp size W and interleave I, position ``p`` is on dcp rank ``(p // I) % W`` as token
``p // (W * I) * I + p % I`` of that rank. This equals the rule of ``kvrdma.topology`` for every block size
that I divides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvrdma.errors import IncompatibleError
from kvrdma.layout import TokenShare

Ints: TypeAlias = npt.NDArray[np.int64]

MAX_PERIOD = 1 << 16
"""Positions of the longest period: time and memory at the handshake grow with it, and peers choose the sizes."""


def tokens_before(share: TokenShare, position: int) -> int:
    """Count the positions below ``position`` that a rank holds."""
    round_tokens = share.dcp_size * share.interleave
    rest = position % round_tokens - share.dcp_rank * share.interleave
    return position // round_tokens * share.interleave + min(max(rest, 0), share.interleave)


class PageSide(NamedTuple):
    """What decides where an engine puts a position: tokens of a page, dcp size, interleave."""

    tokens: int
    dcp_size: int
    interleave: int

    @property
    def period(self) -> int:
        """Positions after which slots repeat, whole pages later."""
        return self.dcp_size * math.lcm(self.tokens, self.interleave)


@dataclass(frozen=True, slots=True)
class Runs:
    """Tokens of one local page that are consecutive on both sides; equal-length int64 arrays.

    ``remote_page`` counts from the remote page at the start of the period.
    """

    slot: Ints
    count: Ints
    dcp_rank: Ints
    remote_page: Ints
    remote_slot: Ints

    def clip(self, lo: int, hi: int) -> Runs:
        """The part of the runs in local slots ``[lo, hi)``."""
        skip = np.maximum(lo - self.slot, 0)
        count = np.minimum(self.slot + self.count, hi) - self.slot - skip
        keep = count > 0
        return Runs(
            (self.slot + skip)[keep],
            count[keep],
            self.dcp_rank[keep],
            self.remote_page[keep],
            (self.remote_slot + skip)[keep],
        )


@dataclass(frozen=True, slots=True)
class TokenMap:
    """The pairing of one period, as long as it has local pages.

    Attributes:
        runs: runs of all local pages, one page after the other.
        cuts: where in the runs each page starts, and their end.
        remote_pages: remote pages of each dcp rank per period.
    """

    runs: Runs
    cuts: Ints
    remote_pages: int

    def __len__(self) -> int:
        """Local pages of a period."""
        return len(self.cuts) - 1

    def page(self, index: int) -> Runs:
        """The runs of one local page of the period."""
        part = slice(int(self.cuts[index]), int(self.cuts[index + 1]))
        runs = self.runs
        columns = (runs.slot, runs.count, runs.dcp_rank, runs.remote_page, runs.remote_slot)
        return Runs(*(column[part] for column in columns))

    @property
    def dcp_ranks(self) -> frozenset[int]:
        """Remote dcp ranks that hold any token of the local rank."""
        return frozenset(np.unique(self.runs.dcp_rank).tolist())


@lru_cache(maxsize=32)
def token_map(local: PageSide, dcp_rank: int, remote: PageSide) -> TokenMap:
    """Pair the slots of one local rank with those of a remote engine.

    Raises:
        IncompatibleError: the sizes have no common period below ``MAX_PERIOD`` positions.
    """
    period = math.lcm(local.period, remote.period)
    if period > MAX_PERIOD:
        raise IncompatibleError(
            f"local {local} and remote {remote} line up only every {period} tokens, more than {MAX_PERIOD}: "
            "use block sizes with a common factor"
        )
    q = np.arange(period // local.dcp_size)
    position = q // local.interleave * (local.dcp_size * local.interleave) + q % local.interleave
    position += dcp_rank * local.interleave
    owner = position // remote.interleave % remote.dcp_size
    theirs = position // (remote.dcp_size * remote.interleave) * remote.interleave + position % remote.interleave
    starts = np.ones(len(q), bool)
    starts[1:] = (
        (owner[1:] != owner[:-1])
        | (theirs[1:] != theirs[:-1] + 1)
        | (q[1:] % local.tokens == 0)
        | (theirs[1:] % remote.tokens == 0)
    )
    first = np.flatnonzero(starts)
    count = np.diff(np.append(first, len(q)))
    columns = (q[first] % local.tokens, count, owner[first], *np.divmod(theirs[first], remote.tokens))
    cuts = np.append(np.searchsorted(first, np.arange(0, len(q), local.tokens)), len(first))
    return TokenMap(Runs(*columns), cuts, period // remote.dcp_size // remote.tokens)
