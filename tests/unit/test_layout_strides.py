"""Whether strided pieces share bytes, against sets of bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvrdma.strides import Piece, nested, shared


def bytes_of(piece: Piece) -> set[int]:
    places = np.array([piece.start])
    for stride, count in (*piece.axes, (1, piece.width)):
        places = (places[:, None] + np.arange(count) * stride).ravel()
    assert len(np.unique(places)) == len(places)
    return set(places.tolist())


def drawn(rng: random.Random, steps: list[tuple[int, int]], width: int) -> Piece | None:
    axes = [(stride, rng.choice((1, count, count))) for stride, count in steps]
    piece = nested(rng.randrange(60), axes, rng.randint(1, width))
    return piece if isinstance(piece, Piece) else None


@pytest.mark.parametrize("seed", range(30))
def test_shared_bytes_are_found(seed: int) -> None:
    """Whatever shares a byte is named; what is named though it does not steps differently."""
    rng = random.Random(seed)
    told = apart = 0
    for _ in range(200):
        steps = [(4, 3), (rng.choice((12, 14)), 2), (rng.choice((30, 32)), 3)]
        pieces = [p for p in (drawn(rng, steps, 4) for _ in range(rng.randint(2, 4))) if p]
        places = [bytes_of(piece) for piece in pieces]
        alias = sum(map(len, places)) > len(set().union(*places))
        found = shared([(piece, index) for index, piece in enumerate(pieces)])
        assert found is not None or not alias, pieces
        assert found is None or alias or len({tuple(stride for stride, _ in p.axes) for p in pieces}) > 1, pieces
        told += found is not None
        apart += found is None
    assert told > 20
    assert apart > 5


def test_strides_that_are_too_short_are_named() -> None:
    assert nested(0, [(3, 2)], 4) == (3, 4)
    assert nested(0, [(100, 1), (8, 4), (16, 2)], 8) == (16, 32)
    assert nested(7, [(8, 4), (40, 2), (32, 1)], 8) == Piece(7, ((40, 2),), 32)


def test_ends_of_a_chain_lie_apart() -> None:
    """The first and the last step alike at the same place of their stride, and only the second touches neither end."""
    first, last = Piece(0, ((10, 3),), 2), Piece(30, ((10, 3),), 2)
    between = Piece(14, ((10, 3),), 2)
    assert shared([(first, "a"), (between, "b"), (last, "c")]) is None
    assert shared([(first, "a"), (between, "b"), (last._replace(start=20), "c")]) == ("a", "c")
