"""What callers hand to an engine, checked where they hand it over: a mistake should not surface on another host."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from kvrdma.errors import LayoutError, PlanError
from kvrdma.layout import KVLayout
from kvrdma.page_format import LayerSpec


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


def check_published(request_id: Hashable, layout: KVLayout, blocks: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Refuse a publication of blocks that this rank does not have.

    Raises:
        PlanError: names the group, the block and the blocks there are.
    """
    if num_tokens < 0:
        raise PlanError(f"request {request_id!r}: num_tokens {num_tokens} must not be negative")
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
