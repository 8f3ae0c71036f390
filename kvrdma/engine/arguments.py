"""What callers hand to an engine, checked where they hand it over: a mistake should not surface on another host."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from kvrdma.engine.shape import tokens_held
from kvrdma.errors import LayoutError, PlanError
from kvrdma.layout import KVLayout
from kvrdma.page_format import LayerSpec
from kvrdma.plan import BlockSpan


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
    layout: KVLayout,
    blocks: Sequence[Sequence[int]],
    num_tokens: int,
    first_blocks: Sequence[int] = (),
) -> None:
    """Refuse a publication of blocks that this rank does not have, or of more tokens than its blocks hold.

    A publication without any block is one of a lease only, whose blocks another rank names.

    Raises:
        PlanError: names the group, the block and the blocks there are.
    """
    if num_tokens < 0:
        raise PlanError(f"request {request_id!r}: num_tokens {num_tokens} must not be negative")
    if first_blocks and len(first_blocks) != len(blocks):
        raise PlanError(f"request {request_id!r}: {len(blocks)} groups of blocks, {len(first_blocks)} first_blocks")
    spans = [BlockSpan(ids, first) for ids, first in zip(blocks, first_blocks or (0,) * len(blocks), strict=True)]
    held = tokens_held(layout, spans)
    if any(blocks) and num_tokens > held and any(page.kind != "state" for page in layout.formats):
        raise PlanError(
            f"request {request_id!r}: its blocks hold at most {held} tokens, {num_tokens} are to be published"
        )
    for group, ids in enumerate(blocks):
        limits = [
            plane.num_pages // layer.pages_per_block
            for layer in layout.layers
            if layer.group == group
            for plane in layer.planes
        ]
        limit = min(limits, default=None)
        bad = [block for block in ids if block < 0 or (limit is not None and block >= limit)]
        if bad:
            raise PlanError(f"request {request_id!r}: block {bad[0]} of group {group} is not one of {limit} blocks")
