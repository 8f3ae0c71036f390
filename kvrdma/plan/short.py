"""Plans the pages of a request without NumPy, where they are few and each pairs with one page of the other side.

A pull waits for its plan, in a process whose caches hold the bytes that were moved last: there whatever is touched
first costs time, each function of NumPy some ten microseconds. This takes only what is as usual, in few steps; all
else, wrong ids above all, it leaves to the planner, which says what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvrdma.plan.pieces import Piece, piece_of
from kvrdma.plan.prepare import LayerGroup, Stream
from kvrdma.plan.request import MAX_POSITION, BlockSpan, TokenRange
from kvrdma.rows import Grid, pack_rows

_MAX_PAGES, _MAX_IDS = 192, 1024
"""Of one layer, and given for both sides; with more of them NumPy is faster."""

Pairs: TypeAlias = list[tuple[int, int]]
"""Local and remote pages."""


def short_pieces(
    group: LayerGroup,
    blocks: tuple[Sequence[BlockSpan], Sequence[BlockSpan]],
    tokens: TokenRange | Sequence[TokenRange],
) -> list[tuple[int, Piece]] | None:
    """Plan the pages of one group of layers; see ``Planner.plan`` for the arguments.

    Returns:
        Sources and what is read of each; None where the request is not as short and plain as this takes.
    """
    number = group.group
    wanted = tokens if type(tokens) is TokenRange else tokens[number] if number < len(tokens) else None
    if not group.pages_pair or type(wanted) is not TokenRange or number >= min(len(blocks[0]), len(blocks[1])):
        return None
    pairs = _pairs(group, blocks[0][number], blocks[1][number], wanted)
    if not pairs:
        return None
    size = group.format.tokens
    low = wanted.start // size * size
    pieces: list[tuple[int, Piece]] = []
    for part, lo, hi in _parts(pairs, wanted.start - low, wanted.end - low, size):
        template = group.template(0, lo, hi)
        if template.reshapes:
            return None
        pieces += [(stream.source, _fill(group, stream, part)) for stream in template.streams]
    return pieces


def _pairs(group: LayerGroup, here: BlockSpan, there: BlockSpan, tokens: TokenRange) -> Pairs | None:
    """Give the local and the remote page of each page of the sequence; None unless all is as it must be."""
    (start, end), size, (many, more) = tokens, group.format.tokens, group.blocks
    local, remote = here.ids, there.ids
    if type(local) is not tuple or type(remote) is not tuple or len(local) + len(remote) > _MAX_IDS:
        return None
    numbers = (start, end, here.first, there.first, *local, *remote)
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) > MAX_POSITION:
        return None
    low, high = start // size, -(-end // size)
    local, remote = local[low - here.first : high - here.first], remote[low - there.first : high - there.first]
    if here.first <= low < high <= low + _MAX_PAGES and there.first <= low and start < end:
        once = len(set(local)) == len(set(remote)) == high - low
        if once and max(local) < many and max(remote) < more:
            return list(zip(local, remote, strict=True))
    return None


def _parts(pairs: Pairs, start: int, end: int, size: int) -> list[tuple[Pairs, int, int]]:
    """Pages wanted whole, then the first and the last one where only some of their slots are, and which these are."""
    if not (start or end % size):  # as nearly always
        return [(sorted(pairs), 0, size)]
    first, last = -(-start // size), end // size
    parts = [(sorted(pairs[first:last]), 0, size)] if first < last else []
    clipped = [page for page in sorted({0, len(pairs) - 1}) if not first <= page < last]
    parts += [([pairs[page]], max(start - page * size, 0), min(end - page * size, size)) for page in clipped]
    return parts


def _fill(group: LayerGroup, stream: Stream, pairs: Pairs) -> Piece:
    """As ``pieces.fill``, for local and remote pages by the former."""
    numbers: list[int] = []
    met, whole, last, last_other = False, int(stream.whole), -2, -2
    for page, other in pairs:
        follows = page == last + 1 and stream.full
        if follows and whole and other == last_other + 1:
            numbers[-1] += 1  # one row for both
        else:
            met = met or (follows and not whole)
            numbers += (page, 0, other, whole)
        last, last_other = page, other
    joined = not (stream.woven or stream.touch or met)
    grid = Grid(stream.bases, stream.cells, pack_rows(numbers), stream.scale)
    return piece_of(group, stream, grid, [page for page, _ in pairs], group.blocks[1] - 1, joined=joined)
