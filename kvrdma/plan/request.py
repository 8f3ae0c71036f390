"""What is asked for in one request: positions and block ids, and the pages of the sequence that they come to."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvrdma.errors import PlanError
from kvrdma.plan.prepare import LayerGroup
from kvrdma.plan.tokens import Ints, tokens_before

MAX_POSITION = 1 << 40
"""The highest position and block id: far above any sequence, and low enough for 64-bit arithmetic on both."""


class TokenRange(NamedTuple):
    """Positions ``[start, end)`` to read: from the end of the cached prefix to the last one computed."""

    start: int
    end: int

    def last(self, window: int) -> TokenRange:
        """What a sliding window still needs: the last ``window`` positions of the range."""
        return TokenRange(max(self.start, self.end - window), self.end)


class BlockSpan(msgspec.Struct, frozen=True):
    """Block ids of one KV group, with the place in the sequence they belong to.

    Attributes:
        ids: one-dimensional integers. Blocks beyond the token range (lookahead) are ignored.
        first: which block of the sequence ``ids[0]`` is; more than 0 where leading blocks were dropped.
    """

    ids: Sequence[int] | Ints
    first: int = 0

    @classmethod
    def without_null(cls, ids: Sequence[int], null: int = 0) -> BlockSpan:
        """Drop leading null blocks, as a sliding window leaves them, and remember how many there were."""
        first = next((i for i, block in enumerate(ids) if block != null), len(ids))
        return cls(ids[first:], first)


def range_of(group: LayerGroup, tokens: TokenRange | Sequence[TokenRange], counts: tuple[int, int]) -> TokenRange:
    """Give the positions that a group of layers wants, or its states, of which each side has ``counts``.

    Raises:
        PlanError: there is no such range, or the states cannot be paired.
    """
    if group.format.kind == "state":
        if counts[0] != counts[1]:
            raise PlanError(
                f"layer {group.names[0]}: {counts[0]} local and {counts[1]} remote state "
                "blocks cannot be paired; clip both to the running state first"
            )
        return TokenRange(0, counts[0])
    if isinstance(tokens, TokenRange):
        given = tokens
    elif group.group < len(tokens):
        given = tokens[group.group]
    else:
        raise PlanError(f"KV group {group.group} has no token range; got {len(tokens)}")
    try:
        wanted = TokenRange(*map(operator.index, given))
    except TypeError:
        raise PlanError(f"KV group {group.group}: a token range is two integers, got {given}") from None
    if not 0 <= wanted.start <= wanted.end <= MAX_POSITION:
        raise PlanError(
            f"KV group {group.group}: token range must satisfy 0 <= start <= end <= {MAX_POSITION}, got {wanted}"
        )
    return wanted


def local_pages(group: LayerGroup, wanted: TokenRange) -> tuple[int, int]:
    """Pages of the sequence, ``[lo, hi)``, that hold what this rank wants."""
    lo, hi = (tokens_before(group.tokens, position) for position in wanted)
    return (lo // group.format.tokens, -(-hi // group.format.tokens)) if lo < hi else (0, 0)


def remote_pages(group: LayerGroup, wanted: TokenRange) -> tuple[int, int]:
    """Pages of the sequence, ``[lo, hi)``, outside of which no remote rank holds anything wanted."""
    (first, last), size = group.ends, group.theirs.tokens
    return tokens_before(last, wanted.start) // size, -(-tokens_before(first, wanted.end) // size)
