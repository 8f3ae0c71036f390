"""What a plan can know at the handshake: layers grouped by geometry, their sources, and page templates.

A template holds the rows of one page relative to page starts. It is computed once per group of equal layers
and page of the period, so that a request costs one broadcast over its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvrdma.errors import IncompatibleError, PlanError
from kvrdma.layout import KVLayout, Layer, TokenShare, check_compatible
from kvrdma.page_format import PageFormat
from kvrdma.plan.cells import (
    LENGTH,
    LOCAL_OFFSET,
    LOCAL_PLANE,
    REMOTE_OFFSET,
    REMOTE_PAGE,
    REMOTE_PLANE,
    SOURCE,
    SourceShare,
    Table,
)
from kvrdma.plan.landing import ReadCost
from kvrdma.plan.page import fill_page, page_rows
from kvrdma.plan.tokens import Ints, PageSide, TokenMap, token_map
from kvrdma.reshape.spec import Reshape
from kvrdma.rows import Rows
from kvrdma.topology import RankId, Source

_MAX_CACHED_ROWS = 1 << 20
_MAX_WARM_PAGES = 8
_MAX_LISTED = 16
_NO_MEMORY = 1 << 61
"""Bytes; sums of some offsets below it are exact in 64 bits."""


@dataclass(frozen=True, slots=True)
class PlaneBases:
    """Where one plane's pages start: base and region of every layer of a group, stride, pages.

    ``room``: bytes of its region that follow each layer's base, at least; -1 where one is in no region. ``gap``: those
    to the next layer's, at least.
    """

    base: Ints
    region: Ints
    page_stride: int
    num_pages: int
    room: int
    gap: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows of a page that share source and planes; arrays of one length, relative to page starts.

    Attributes:
        source: which of the sources.
        here, there: the plane of either side.
        bases: ``(L, 4)`` uint64 rows of length 0: where the planes start, layer by layer.
        cells, scale: the rows, by local offset, for a ``Grid`` of pages by their numbers; the length of a ``whole`` one
            is in the scale.
        remote_page: remote page of each, from that at the start of the period on.
        first, reach: bytes of the local page between which they lie.
        remote_reach: bytes of the remote page that they need.
        remote_pages: lowest and highest remote page.
        nbytes: of one page.
        touch: some rows follow each other in the local page.
        woven: pages lie among one another here, so that rows of any two may meet.
        full: a page ends where the next one begins, so that rows of pages that follow each other may meet.
        whole: a page is one row on both sides: pages that follow each other on both are joined.
    """

    source: int
    here: PlaneBases
    there: PlaneBases
    bases: Rows
    cells: Rows
    scale: Rows
    remote_page: Ints
    first: int
    reach: int
    remote_reach: int
    remote_pages: tuple[int, int]
    nbytes: int
    touch: bool
    woven: bool
    full: bool
    whole: bool


@dataclass(frozen=True, slots=True)
class PageTemplate:
    """All rows of one page, and the reshapes that finish it as ``(plane, reshape)``."""

    streams: tuple[Stream, ...]
    reshapes: tuple[tuple[int, Reshape], ...]


@dataclass(slots=True)
class LayerGroup:
    """Layers whose pages are filled by the same rows at different bases.

    ``remote`` maps (source, plane) to the bases on that source. ``local`` bases are addresses, remote bases
    offsets in a region. ``blocks``: how many either side has, by its smallest tensor. ``ends``: the remote token
    shares that hold the first and the last position of a round. ``pages_pair``: each page here is a block and holds the
    same positions as one page, a block, of the other side.
    """

    names: tuple[str, ...]
    group: int
    format: PageFormat
    pages_per_block: int
    remote_pages_per_block: int
    tokens: TokenShare
    shares: tuple[SourceShare, ...]
    map: TokenMap
    theirs: PageSide
    local: tuple[PlaneBases, ...]
    remote: Mapping[tuple[int, int], PlaneBases]
    cost: ReadCost
    blocks: tuple[int, int] = field(init=False)
    ends: tuple[TokenShare, TokenShare] = field(init=False)
    pages_pair: bool = field(init=False)
    _templates: dict[tuple[int, int, int], PageTemplate] = field(default_factory=dict)
    _pairs: dict[tuple[int, int, int], tuple[PlaneBases, PlaneBases, Rows]] = field(default_factory=dict)
    _rows: int = 0

    def __post_init__(self) -> None:
        pages = [min(plane.num_pages for plane in planes) for planes in (self.local, self.remote.values())]
        self.blocks = pages[0] // self.pages_per_block, pages[1] // self.remote_pages_per_block
        size, interleave = self.theirs.dcp_size, self.theirs.interleave
        self.ends = TokenShare(0, size, interleave), TokenShare(size - 1, size, interleave)
        alone = self.format.kind != "state" and self.tokens.dcp_size == size == 1
        paired = {self.pages_per_block, self.remote_pages_per_block, len(self.map), self.map.remote_pages}
        self.pages_pair = alone and paired == {1}

    def template(self, page: int, lo: int, hi: int) -> PageTemplate:
        """Rows for slots ``[lo, hi)`` of the ``page``-th page of the period; reshapes for full pages only."""
        key = (page, lo, hi)
        found = self._templates.get(key)
        if found is None:
            found = self._build(page, lo, hi)
            self._rows += sum(len(stream.cells) for stream in found.streams)
            if self._rows > _MAX_CACHED_ROWS:
                self._templates.clear()
                self._rows = 0
            self._templates[key] = found
        return found

    def _paired(self, source: int, local_plane: int, remote_plane: int) -> tuple[PlaneBases, PlaneBases, Rows]:
        key = (source, local_plane, remote_plane)
        if key not in self._pairs:
            local, remote = self.local[local_plane], self.remote[source, remote_plane]
            columns = (local.base, remote.region, remote.base, np.zeros_like(local.base))
            self._pairs[key] = local, remote, np.stack(columns, axis=1).astype(np.uint64)
        return self._pairs[key]

    def warm(self) -> None:
        """Build the templates of full pages now, unless the period has too many of them."""
        if len(self.map) <= _MAX_WARM_PAGES:
            for page in range(len(self.map)):
                self.template(page, 0, self.format.tokens)

    def _build(self, page: int, lo: int, hi: int) -> PageTemplate:
        runs = self.map.page(page).clip(lo, hi)
        if hi - lo < self.format.tokens:
            return PageTemplate(tuple(self._streams(page_rows(self.format, self.shares, runs))), ())
        fill = fill_page(self.format, self.shares, runs, self.cost)
        return PageTemplate(tuple(self._streams(fill.rows)), fill.reshapes)

    def _streams(self, table: Table) -> Iterator[Stream]:
        keys = table[:, [SOURCE, LOCAL_PLANE, REMOTE_PLANE]]
        for key in np.unique(keys, axis=0):
            rows = table[(keys == key).all(axis=1)]
            rows = rows[np.argsort(rows[:, LOCAL_OFFSET], kind="stable")]
            yield _stream(int(key[0]), *self._paired(*key.tolist()), rows)


def _stream(source: int, here: PlaneBases, there: PlaneBases, bases: Rows, rows: Table) -> Stream:
    columns = (REMOTE_PAGE, LOCAL_OFFSET, REMOTE_OFFSET, LENGTH)
    pages, local, remote, length = (np.ascontiguousarray(rows[:, column]) for column in columns)
    first, reach = int(local[0]), int((local + length).max())
    whole = len(rows) == 1 and reach - first == here.page_stride == there.page_stride
    return Stream(
        *(source, here, there, bases),
        cells=_table(local, remote, 0 if whole else length),
        scale=_table(here.page_stride, there.page_stride, length if whole else 0),
        remote_page=pages,
        first=first,
        reach=reach,
        remote_reach=int((remote + length).max()),
        remote_pages=(int(pages.min()), int(pages.max())),
        nbytes=int(length.sum()),
        touch=bool((local[1:] <= (local + length)[:-1]).any()),
        woven=reach > first + here.page_stride,
        full=reach == first + here.page_stride,
        whole=whole,
    )


def _table(local: Ints | int, offset: Ints | int, length: Ints | int) -> Rows:
    columns = np.broadcast_arrays(*map(np.atleast_1d, (local, 0, offset, length)))
    return np.stack(columns, axis=1).astype(np.uint64)


def prepare(
    local: KVLayout, remote: Mapping[RankId, KVLayout], sources: Sequence[Source], cost: ReadCost
) -> list[LayerGroup]:
    """Check a pair of engines and group the local layers by geometry.

    Args:
        local: layout of this rank.
        remote: layouts of (at least) the source ranks.
        sources: what ``select_sources`` chose, in order of preference.
        cost: prices for the choice between direct rows and reshapes.

    Raises:
        IncompatibleError: a pair differs in a way no plan can bridge, or some head or token share of a layer
            is on none of the sources.
        PlanError: a source has no layout.
    """
    for source in sources:
        if source.rank not in remote:
            raise PlanError(f"source {source.rank} has no layout; known ranks: {sorted(remote)}")
        check_compatible(local, remote[source.rank])
    layouts = [remote[source.rank] for source in sources]
    named = [layout.by_name() for layout in layouts]
    groups: dict[object, list[tuple[Layer, list[Layer | None]]]] = {}
    shares: dict[object, tuple[SourceShare, ...]] = {}
    for layer in local.layers:
        found = tuple(_claim(local, layer, layouts, [layers.get(layer.name) for layers in named]))
        others = [layers.get(layer.name) for layers in named]
        key = (_key(layer), found, tuple(_key(others[share.index]) for share in found))
        groups.setdefault(key, []).append((layer, others))
        shares[key] = found
    return [_group(local, layouts, members, (shares[key], cost)) for key, members in groups.items()]


def _key(layer: Layer | None) -> object:
    """Everything about a layer but its name and bases."""
    assert layer is not None
    planes = tuple((plane.page_stride, plane.num_pages) for plane in layer.planes)
    return layer.group, layer.format, layer.heads, layer.pages_per_block, planes


def _share(layout: KVLayout, fmt: PageFormat) -> TokenShare:
    """Token share of a layer: state is not split by position."""
    if fmt.kind == "state":
        return TokenShare()
    return TokenShare(layout.dcp_rank, layout.dcp_size, layout.interleave)


def _claim(
    local: KVLayout, layer: Layer, layouts: Sequence[KVLayout], others: Sequence[Layer | None]
) -> Iterator[SourceShare]:
    """Give each (head, dcp rank) of a layer to the first source that holds it; refuse if one is left."""
    fmt = local.format_of(layer)
    side: tuple[PageSide, int] | None = None
    missing: set[tuple[int, int]] = set()
    for index, (layout, other) in enumerate(zip(layouts, others, strict=True)):
        if other is None:
            continue
        theirs = layout.format_of(other)
        share = _share(layout, theirs)
        this = (PageSide(theirs.tokens, share.dcp_size, share.interleave), other.pages_per_block)
        if side is None:
            side, mine = this, _share(local, fmt)
            ranks = token_map(PageSide(fmt.tokens, mine.dcp_size, mine.interleave), mine.dcp_rank, this[0]).dcp_ranks
            missing = {(head, rank) for head in range(*layer.heads) for rank in ranks}
        if side != this:
            raise IncompatibleError(f"layer {layer.name}: remote ranks differ in block or dcp sizes: {side} and {this}")
        heads = [h for h in range(*other.heads) if (h, share.dcp_rank) in missing]
        missing -= {(h, share.dcp_rank) for h in heads}
        for lo, hi in _intervals(heads):
            places = (hi - lo, lo - layer.heads[0], lo - other.heads[0])
            yield SourceShare(index, share.dcp_rank, theirs, *places)
    if missing or side is None:
        raise IncompatibleError(
            f"layer {layer.name}: no source holds (head, dcp rank) {_some(missing)}; local heads "
            f"are {layer.heads} of {layer.total_heads}, remote heads {_some(o.heads for o in others if o)}"
        )


def _some(pairs: Iterable[tuple[int, int]]) -> str:
    """List pairs of numbers for a message, without the rest of a long list."""
    ordered = sorted(pairs)
    text = str(ordered[:_MAX_LISTED]) if ordered else "any"
    return text if len(ordered) <= _MAX_LISTED else f"{text} and {len(ordered) - _MAX_LISTED} more"


def _intervals(heads: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending integers as ``[lo, hi)`` intervals."""
    cuts = [i for i in range(len(heads)) if i == 0 or heads[i] != heads[i - 1] + 1]
    for start, end in zip(cuts, [*cuts[1:], len(heads)], strict=False):
        yield heads[start], heads[end - 1] + 1


def _group(
    local: KVLayout,
    layouts: Sequence[KVLayout],
    members: list[tuple[Layer, list[Layer | None]]],
    chosen: tuple[tuple[SourceShare, ...], ReadCost],
) -> LayerGroup:
    shares, cost = chosen
    members.sort(key=lambda member: _address(local, member[0]))
    layers = [layer for layer, _ in members]
    first = layers[0]
    fmt, tokens = local.format_of(first), _share(local, local.format_of(first))
    bases = tuple(_bases(layers, plane, local, addresses=True) for plane in range(len(first.planes)))
    remote: dict[tuple[int, int], PlaneBases] = {}
    per_block = 1
    theirs = PageSide(1, 1, 1)
    for share in shares:
        others = [other for _, row in members if (other := row[share.index]) is not None]
        per_block = others[0].pages_per_block
        token_share = _share(layouts[share.index], share.format)
        theirs = PageSide(share.format.tokens, token_share.dcp_size, token_share.interleave)
        layout = layouts[share.index]
        remote.update({(share.index, plane): _bases(others, plane, layout) for plane in range(len(others[0].planes))})
    pairing = token_map(PageSide(fmt.tokens, tokens.dcp_size, tokens.interleave), tokens.dcp_rank, theirs)
    names = tuple(layer.name for layer in layers)
    sizes = (first.pages_per_block, per_block)
    return LayerGroup(names, first.group, fmt, *sizes, tokens, shares, pairing, theirs, bases, remote, cost)


def _address(local: KVLayout, layer: Layer) -> int:
    return local.regions[layer.planes[0].region].addr + layer.planes[0].offset


def _bases(layers: Sequence[Layer], plane: int, owner: KVLayout, *, addresses: bool = False) -> PlaneBases:
    """Bases of one plane over layers of ``owner``: addresses, or else region offsets."""
    planes = [layer.planes[plane] for layer in layers]
    for layer, p in zip(layers, planes, strict=True):
        if max(abs(p.page_stride * p.num_pages), abs(p.offset)) >= _NO_MEMORY:
            raise PlanError(
                f"layer {layer.name}: {p.num_pages} pages, {p.page_stride} bytes apart from byte {p.offset} on, are "
                "more than any memory: the layout is wrong"
            )
    starts = [owner.regions[p.region].addr if addresses else 0 for p in planes]
    base = [p.offset + start for p, start in zip(planes, starts, strict=True)]
    known = all(0 <= p.region < len(owner.regions) and p.offset >= 0 for p in planes)
    sizes = [owner.regions[p.region].nbytes for p in planes] if known else []
    return PlaneBases(
        base=np.array(base, np.int64),
        region=np.array([p.region for p in planes], np.int64),
        page_stride=planes[0].page_stride,
        num_pages=planes[0].num_pages,
        room=min((size - p.offset for p, size in zip(planes, sizes, strict=False)), default=-1),
        gap=min((after - before for before, after in pairwise(base)), default=1 << 64),
    )
