"""What callers hand to an engine, checked where they hand it over: a mistake should not surface on another host."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from numbers import Real

from kvrdma.engine.shape import Limits
from kvrdma.errors import ConfigError, LayoutError, LeaseError, PlanError
from kvrdma.page_format import LayerSpec
from kvrdma.plan import BlockSpan, TokenRange

_MAX_TOKENS = 1 << 53
_MAX_FIRST = 1 << 31
_MAX_GROUPS = 256
"""What a reference takes, see ``kvrdma.reference``."""
_MAX_CONSUMERS = 1 << 14
"""As many readers as a lease remembers."""


def check_caches(caches: object, specs: object) -> None:
    """Refuse caches that are no mapping of layer names to tensors, empty, or not writable.

    Raises:
        LayoutError: names the layer or what is given.
    """
    if not isinstance(caches, Mapping) or not caches:
        raise LayoutError(f"caches must map layer names to tensors, at least one; got {type(caches).__name__}")
    if not isinstance(specs, LayerSpec | Mapping):
        raise LayoutError(f"specs must be a LayerSpec, or map layer names to them; got {type(specs).__name__}")
    for name, tensor in caches.items():
        for plane in tensor if isinstance(tensor, tuple | list) else (tensor,):
            flags = getattr(plane, "flags", None)
            if flags is not None and getattr(flags, "writeable", True) is False:
                raise LayoutError(f"layer {name} is read-only: pulls write into it; give a writable array")


def check_published(
    request_id: Hashable,
    limits: Limits,
    blocks: Sequence[Sequence[int]],
    num_tokens: int,
    first_blocks: Sequence[int] = (),
    consumers: int = 1,
) -> None:
    """Refuse a publication of blocks that this rank does not have, or of more tokens than its blocks hold.

    A publication without any block is one of a lease only, whose blocks another rank names.

    Raises:
        PlanError: names the group, the block and the blocks there are.
        LeaseError: no lease waits for so many consumers.
    """
    where = f"request {request_id!r}"
    if consumers > _MAX_CONSUMERS:
        raise LeaseError(f"{where}: consumers={consumers}, a lease waits for at most {_MAX_CONSUMERS}")
    _check_numbers(where, len(blocks), num_tokens, first_blocks)
    firsts = first_blocks or (0,) * len(blocks)
    held = limits.tokens_held([BlockSpan(ids, first) for ids, first in zip(blocks, firsts, strict=True)])
    if any(map(len, blocks)) and num_tokens > held and not limits.only_state:
        raise PlanError(f"{where}: its blocks hold at most {held} tokens, {num_tokens} are to be published")
    for group, ids in enumerate(blocks):
        limit = limits.blocks.get(group)
        if len(ids) and (min(ids) < 0 or (limit is not None and max(ids) >= limit)):
            bad = next(block for block in ids if block < 0 or (limit is not None and block >= limit))
            raise PlanError(f"{where}: block {bad} of group {group} is not one of {limit} blocks")
        check_apart(where, group, ids[: limits.blocks_of(group, num_tokens, firsts[group])])


def _check_numbers(where: str, groups: int, num_tokens: int, first_blocks: Sequence[int]) -> None:
    """Refuse what no reference can say: its reader would be told that it was altered."""
    if groups > _MAX_GROUPS:
        raise PlanError(f"{where}: {groups} groups of blocks, at most {_MAX_GROUPS} can be published")
    if not 0 <= num_tokens <= _MAX_TOKENS:
        raise PlanError(f"{where}: num_tokens {num_tokens} must not be negative, nor more than {_MAX_TOKENS}")
    if not first_blocks:
        return
    if len(first_blocks) != groups:
        raise PlanError(f"{where}: {groups} groups of blocks, {len(first_blocks)} first_blocks")
    if min(first_blocks) < 0 or max(first_blocks) > _MAX_FIRST:
        bad = next(first for first in first_blocks if not 0 <= first <= _MAX_FIRST)
        raise PlanError(f"{where}: first_blocks has {bad}, which is no number of a block from 0 to {_MAX_FIRST}")


def check_apart(where: str, group: int, ids: Sequence[int]) -> None:
    """Refuse a block that stands for two places of a sequence: no reader can say which of them it holds.

    Raises:
        PlanError: names the block and its group.
    """
    if len(set(ids)) < len(ids):
        bad = next(block for block, times in Counter(ids).items() if times > 1)
        raise PlanError(
            f"{where}: block {bad} of group {group} appears twice: each block holds its own tokens; null blocks at the "
            "start of a window are left out, and counted by first_blocks"
        )


def check_pull(
    request_id: Hashable,
    limits: Limits,
    num_tokens: int,
    blocks: Sequence[BlockSpan],
    tokens: TokenRange | Sequence[TokenRange],
) -> None:
    """Refuse a pull of more than was published, or of more than its blocks hold.

    Raises:
        PlanError: names the range, and what it has to fit.
    """
    if isinstance(tokens, TokenRange):
        ranges: Sequence[TokenRange] = (tokens,)
    else:
        if not hasattr(tokens, "__len__") or {type(each) for each in tokens} - {TokenRange}:
            raise PlanError(
                f"pull {request_id!r}: tokens must be a TokenRange, or one per KV group; got {tokens!r:.80}"
            )
        if len(tokens) > max(1, len(blocks)):
            raise PlanError(f"pull {request_id!r}: {len(tokens)} token ranges for {len(blocks)} KV groups of blocks")
        ranges = tokens
    limit = limits.tokens_held(blocks)
    for span in ranges:
        start, end = span
        if type(start) is not int or type(end) is not int:  # numbers of the usual class are not asked what they are
            start, end = (whole(f"pull {request_id!r}: a token of {tuple(span)}", each) for each in span)
        if not 0 <= start <= end <= num_tokens:
            raise PlanError(f"pull {request_id!r}: tokens {span} of {num_tokens} published ones")
        if start < end > limit and not limits.only_state:
            raise PlanError(f"pull {request_id!r}: tokens {span} do not fit blocks for {limit} of them")


def whole(name: str, value: int) -> int:
    """Read a whole number, of whatever class; NumPy's do not survive JSON.

    Raises:
        PlanError: it is none; says so under ``name``.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise PlanError(f"{name} must be a whole number, got {value!r:.80}") from None


def whole_numbers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Read a list of whole numbers.

    Raises:
        PlanError: it is no list, or not of such; says so under ``name``.
    """
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise PlanError(f"{name} must be a list of whole numbers, got {values!r:.80}")
    return tuple(each if type(each) is int else whole(f"each of {name}", each) for each in values)


def time_span(name: str, value: object) -> float:
    """Read a number of seconds: one below 0 is over at once. NaN is refused: no timer behind it would ever run.

    Raises:
        ConfigError: it is no number; says so under ``name``.
    """
    if type(value) is float and not math.isnan(value):
        return value  # as nearly always
    if type(value) is int and abs(value) < 1 << 53:
        return float(value)
    span = math.nan
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            span = float(value)
        except OverflowError:  # an integer beyond all floats
            span = math.inf if value > 0 else -math.inf  # type: ignore[operator]
    if math.isnan(span):
        raise ConfigError(f"{name}={value!r:.80} is not a number of seconds")
    return span
