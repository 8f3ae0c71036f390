"""Which tensors are recognised, where each byte of a page is, and what is refused."""

from __future__ import annotations

import itertools
import re

import msgspec
import numpy as np
import pytest

from kvrdma.errors import LayoutError
from kvrdma.layout import KVLayout, TokenShare
from kvrdma.page_format import LayerSpec, Part

ATTENTION = LayerSpec((0, 4), 8, 16)


def only(layout: KVLayout) -> tuple[str, tuple[Part, ...]]:
    (fmt,) = layout.formats
    return fmt.name, fmt.parts


def read(tensor: object, spec: LayerSpec = ATTENTION) -> KVLayout:
    return KVLayout.from_tensors({"a": tensor}, spec)


def test_hnd() -> None:
    """[B, H, N, C], 2 bytes an element: page of 4 heads, 16 tokens, 6 + 6 elements."""
    name, parts = only(read(np.zeros((3, 4, 16, 12), np.uint16)))
    assert name == "HND"
    assert parts == (Part("k", 0, 0, 384, 24, 2, 6, 2), Part("v", 0, 12, 384, 24, 2, 6, 2))


def test_nhd_by_strides_and_by_shape() -> None:
    memory = np.zeros((3, 16, 4, 12), np.uint16)
    expected = (Part("k", 0, 0, 24, 96, 2, 6, 2), Part("v", 0, 12, 24, 96, 2, 6, 2))
    assert only(read(memory.transpose(0, 2, 1, 3))) == ("NHD", expected)
    assert only(read(memory)) == ("NHD", expected)


def test_mla() -> None:
    spec = LayerSpec((0, 1), 1, 16, "mla")
    for shape in ((3, 16, 576), (3, 1, 16, 576)):
        name, (part,) = only(read(np.zeros(shape, np.uint8), spec))
        assert (name, part.name, part.token_stride, part.elems) == ("MLA", "latent", 576, 576)


def test_cpu_page() -> None:
    """Per head 16 x 6 keys transposed, then 16 x 6 values: key element d of token n at (d * 16 + n) * 2."""
    name, (keys, values) = only(read(np.zeros((3, 4, 16, 12), np.uint16), LayerSpec((0, 4), 8, 16, "cpu")))
    assert name == "CPU"
    assert keys == Part("k", 0, 0, 384, 2, 32, 6, 2)
    assert values == Part("v", 0, 192, 384, 12, 2, 6, 2)


def test_block_outermost_strides_share_one_region() -> None:
    memory = np.zeros((5, 2, 4, 16, 12), np.uint16)
    layout = KVLayout.from_tensors({"a": memory[:, 0], "b": memory[:, 1]}, ATTENTION)
    assert len(layout.regions) == 1
    assert layout.regions[0].nbytes == memory.nbytes
    planes = [layer.planes[0] for layer in layout.layers]
    assert [(p.offset, p.page_stride, p.num_pages) for p in planes] == [(0, 3072, 5), (1536, 3072, 5)]


def test_leading_two_and_second_two() -> None:
    inner, outer = (read(np.zeros(shape, np.uint16)) for shape in ((7, 2, 16, 4, 6), (2, 7, 16, 4, 6)))
    name, (keys, values) = only(inner)
    assert name == "NHD (2)"
    assert (keys.offset, values.offset, keys.token_stride, keys.head_stride) == (0, 768, 48, 12)
    assert [plane.page_stride for plane in inner.layers[0].planes] == [1536]
    name, (keys, values) = only(outer)
    assert name == "NHD (2)"
    assert (keys.plane, keys.offset, values.plane, values.offset) == (0, 0, 1, 0)
    assert len(outer.regions) == 1
    assert [(p.region, p.offset, p.page_stride) for p in outer.layers[0].planes] == [(0, 0, 768), (0, 5376, 768)]


def test_separate_keys_and_values_are_two_regions() -> None:
    pair = tuple(np.zeros((7, 16, 4, 6), np.uint16) for _ in "kv")
    layout = read(pair)
    assert len(layout.regions) == 2
    assert [plane.region for plane in layout.layers[0].planes] == [0, 1]
    assert [part.plane for part in layout.formats[0].parts] == [0, 1]


def test_odd_content_and_inline_scales_stay_one_part() -> None:
    for content, spec in ((13, ATTENTION), (132, LayerSpec((0, 4), 8, 16, kv_split=False))):
        _, (part,) = only(read(np.zeros((3, 4, 16, content), np.uint8), spec))
        assert (part.name, part.nbytes) == ("kv", content)


def test_state_is_opaque() -> None:
    spec = LayerSpec((1, 2), 4, 1, "state")
    layout = read(np.zeros((3, 1, 1, 999), np.int8), spec)
    assert layout.formats[0].plane_nbytes(0) == 999
    padded = np.zeros((3, 1024), np.int8)[:, :999]
    assert read(padded, spec).layers[0].planes[0].page_stride == 1024


def test_kernel_blocks() -> None:
    """Blocks of 64 tokens stored as kernel blocks of 16: a block id names four pages."""
    layout = read(np.zeros((12, 4, 16, 12), np.uint16), LayerSpec((0, 4), 8, 64))
    assert (layout.layers[0].pages_per_block, layout.block_size(layout.layers[0])) == (4, 64)


def test_declared_dtype_wins() -> None:
    spec = LayerSpec((0, 4), 8, 16, dtype="bfloat16")
    assert read(np.zeros((3, 4, 16, 12), np.int8), spec).formats[0].dtype == "bfloat16"


@pytest.mark.needs("torch")
def test_torch_tensors_say_the_same() -> None:
    import torch

    backing = torch.zeros(3 * 4 * 16 * 12 + 10, dtype=torch.bfloat16)
    view = backing[10:].view(3, 16, 4, 12).permute(0, 2, 1, 3)
    layout = read(view)
    assert only(layout) == only(read(np.zeros((3, 16, 4, 12), np.uint16)))
    assert layout.formats[0].dtype == "bfloat16"
    assert layout.layers[0].planes[0].offset == 20
    assert (layout.regions[0].addr, layout.regions[0].nbytes) == (backing.data_ptr(), backing.nbytes)
    one = torch.zeros(2, 3, 4, 16, 12)
    both = KVLayout.from_tensors({"a": one[0], "b": one[1]}, ATTENTION)
    assert len(both.regions) == 1
    assert both.layers[1].planes[0].offset == one[0].nbytes


def test_round_trip_is_small_and_independent_of_blocks() -> None:
    few, many = (
        KVLayout.from_tensors(
            {f"l{i}": np.zeros((blocks, 4, 16, 12), np.uint16) for i in range(4)},
            ATTENTION,
            TokenShare(1, 2, 4),
        )
        for blocks in (3, 100)
    )
    sent = msgspec.msgpack.encode(many)
    assert msgspec.msgpack.decode(sent, type=KVLayout) == many
    assert len(sent) < len(msgspec.msgpack.encode(few)) + 100


def z(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint16)


CPU, MLA = LayerSpec((0, 4), 8, 16, "cpu"), LayerSpec((0, 1), 1, 16, "mla")
STATE = LayerSpec((0, 1), 1, 1, "state")


@pytest.mark.parametrize(
    ("tensor", "spec", "why"),
    [
        (z(3, 4, 16, 24)[..., ::2], ATTENTION, "content axis steps 4 bytes"),
        (z(3, 4, 16, 12)[:, ::-1], ATTENTION, "axis H steps -384 bytes"),
        (np.broadcast_to(z(1, 4, 16, 12), (3, 4, 16, 12)), ATTENTION, "axis B steps 0 bytes"),
        (z(3, 5, 16, 12), ATTENTION, "4 heads and blocks of 16 tokens"),
        (z(3, 4, 12, 12), ATTENTION, "4 heads and blocks of 16 tokens"),
        (z(3, 4, 16), ATTENTION, "it has 3 axes, attention needs 4 or 5"),
        (z(3, 40), ATTENTION, "it has 2 axes, attention needs 4 or 5"),
        (z(3, 40), MLA, "it has 2 axes, mla needs 3 or 4"),
        ((z(3, 40), z(3, 40)), ATTENTION, "it has 2 axes, attention needs 4"),
        (z(3, 3, 4, 16, 6), ATTENTION, "4 heads and blocks of 16 tokens"),
        (z(3, 4, 16, 13), CPU, "equal size"),
        (z(3, 16, 4, 12).transpose(0, 2, 1, 3), CPU, "dense"),
        (z(3, 2, 16, 12), MLA, "1 heads and blocks of 16 tokens"),
        (z(3, 40)[:, ::2], STATE, "must be dense"),
        (z(0, 4, 16, 12), ATTENTION, "empty"),
        ((z(3, 4, 16, 6), z(3, 4, 16, 8)), ATTENTION, "values differ"),
        ((z(3, 16, 1), z(3, 16, 1)), MLA, "values differ"),
        ((z(3, 4, 16, 6),) * 3, ATTENTION, "one of 3 tensors"),
        (z(2, 2, 16, 4, 6), ATTENTION, r"any of \['2BNHC', 'B2NHC'\]: say which"),
        (z(3, 16, 16, 12), LayerSpec((0, 16), 16, 16), r"any of \['BHNC', 'BNHC'\]: say which"),
    ],
)
def test_unknown_is_refused_with_shape_strides_and_what_is_known(tensor: object, spec: LayerSpec, why: str) -> None:
    with pytest.raises(LayoutError, match=why) as caught:
        read(tensor, spec)
    message = str(caught.value)
    first = tensor[0] if isinstance(tensor, tuple) else tensor
    assert isinstance(first, np.ndarray)
    for part in ("layer a", str(first.shape), str(first.strides), "known formats", "2BNHC", "keys [D, N]"):
        assert part in message
    assert message.count("known formats") == 1
    assert message.count("\n") == 1


def test_dims_settle_a_doubt() -> None:
    spec = LayerSpec((0, 16), 16, 16)
    names = [only(read(z(3, 16, 16, 12), LayerSpec((0, 16), 16, 16, dims=dims)))[0] for dims in ("BHNC", "BNHC")]
    assert names == ["HND", "NHD"]
    one = LayerSpec((0, 1), 1, 1)
    assert only(read(z(3, 1, 1, 12), one))[0] == "HND"
    with pytest.raises(LayoutError, match="dims 2BNHC"):
        read(z(3, 16, 16, 12), LayerSpec(spec.heads, 16, 16, dims="2BNHC"))


@pytest.mark.parametrize(
    ("share", "spec", "why"),
    [
        (TokenShare(2, 2, 1), ATTENTION, "dcp_rank 2, dcp_size 2"),
        (TokenShare(0, 2, 3), ATTENTION, "interleave 3 does not divide the block of 16 tokens"),
        (TokenShare(), LayerSpec((6, 10), 8, 16), r"heads \[6, 10\) of 8"),
    ],
)
def test_shares_that_do_not_fit(share: TokenShare, spec: LayerSpec, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        KVLayout.from_tensors({"a": z(3, 4, 16, 12)}, spec, share)


def test_missing_spec_and_unreadable_tensor() -> None:
    with pytest.raises(LayoutError, match="layer b has no LayerSpec"):
        KVLayout.from_tensors({"b": z(3, 4, 16, 12)}, {"a": ATTENTION})
    with pytest.raises(LayoutError, match="strides of a list"):
        read([[1, 2]])


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("format", 7, "format 7 of 1 formats"),
        ("heads", (0, 3), r"heads \[0, 3\) of 8"),
        ("pages_per_block", 0, "pages_per_block 0"),
        ("planes", (), "names 1 planes, the layer has 0"),
    ],
)
def test_a_peer_cannot_send_nonsense(field: str, value: object, why: str) -> None:
    layout = read(z(3, 4, 16, 12))
    layer = msgspec.structs.replace(layout.layers[0], **{field: value})
    with pytest.raises(LayoutError, match=why):
        msgspec.structs.replace(layout, layers=(layer,)).validate()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("region", 1, "does not fit 1 regions"),
        ("num_pages", 4, "span bytes 0 to 6144 of region 0 of 4608 bytes"),
        ("offset", -1, "span bytes -1"),
        ("page_stride", -8, "pages -8 bytes apart"),
    ],
)
def test_pages_stay_in_their_region(field: str, value: int, why: str) -> None:
    layout = read(z(3, 4, 16, 12))
    plane = msgspec.structs.replace(layout.layers[0].planes[0], **{field: value})
    layer = msgspec.structs.replace(layout.layers[0], planes=(plane,))
    with pytest.raises(LayoutError, match=why):
        msgspec.structs.replace(layout, layers=(layer,)).validate()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("total_heads", 1 << 17, "heads .* of 131072"),
        ("pages_per_block", 1 << 40, "pages_per_block 1099511627776 must be 1 to 65536"),
        ("pages_per_block", 4, "its 3 pages hold no block of 4 pages"),
        ("group", 1 << 40, "group 1099511627776"),
    ],
)
def test_a_peer_cannot_size_our_memory(field: str, value: object, why: str) -> None:
    test_a_peer_cannot_send_nonsense(field, value, why)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokens": 1 << 30}, "1073741824 tokens"),
        ({"heads": 1 << 30}, "1073741824 heads"),
        ({"kind": "zzz"}, "got 'zzz'"),
        ({"parts": ()}, "got 0"),
    ],
)
def test_a_peer_cannot_send_absurd_pages(changes: dict[str, object], why: str) -> None:
    layout = read(z(3, 4, 16, 12))
    fmt = msgspec.structs.replace(layout.formats[0], **changes)
    with pytest.raises(LayoutError, match=why):
        msgspec.structs.replace(layout, formats=(fmt,)).validate()


def test_many_parts_times_many_layers_cost_nothing() -> None:
    """Four thousand of each, in a few kilobytes on the wire: refused by the number of parts, before any product."""
    layout = read(z(3, 4, 16, 12))
    fmt = msgspec.structs.replace(layout.formats[0], parts=layout.formats[0].parts * 2000)
    layers = tuple(msgspec.structs.replace(layout.layers[0], name=str(i)) for i in range(4000))
    with pytest.raises(LayoutError, match="need 1 to 16 parts of different names, got 4000"):
        msgspec.structs.replace(layout, formats=(fmt,), layers=layers).validate()
    with pytest.raises(LayoutError, match="8000 layers are more than the 4096"):
        msgspec.structs.replace(layout, layers=layers * 2).validate()


def with_part(layout: KVLayout, index: int, **changes: object) -> KVLayout:
    fmt = layout.formats[0]
    parts = [msgspec.structs.replace(p, **changes) if i == index else p for i, p in enumerate(fmt.parts)]
    return msgspec.structs.replace(layout, formats=(msgspec.structs.replace(fmt, parts=tuple(parts)),))


@pytest.mark.parametrize(
    ("index", "changes", "why"),
    [
        (0, {"head_stride": 0}, "part k: an axis steps 0 bytes but 2 bytes lie inside"),
        (0, {"token_stride": 0}, "part k: an axis steps 0 bytes"),
        (0, {"elem_stride": 0}, "part k: an axis steps 0 bytes but 2 bytes"),
        (0, {"elem_stride": 1}, "part k: an axis steps 1 bytes"),
        (1, {"offset": 0}, "layer a part k and layer a part v of KV group 0 share bytes"),
        (1, {"offset": 4}, "layer a part k and layer a part v"),
        (1, {"name": "k"}, "parts of different names, got 2: ['k']"),
    ],
)
def test_a_peer_cannot_lay_parts_on_one_another(index: int, changes: dict[str, object], why: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(why)):
        with_part(read(z(3, 4, 16, 12)), index, **changes).validate()


@pytest.mark.parametrize("stride", [0, 1, 1500, 1528])
def test_a_peer_cannot_lay_pages_on_one_another(stride: int) -> None:
    layout = read(z(3, 4, 16, 12))
    plane = msgspec.structs.replace(layout.layers[0].planes[0], page_stride=stride)
    layer = msgspec.structs.replace(layout.layers[0], planes=(plane,))
    with pytest.raises(
        LayoutError, match=f"an axis steps {stride} bytes but .*pages {stride} bytes apart|part k and layer a part v"
    ):
        msgspec.structs.replace(layout, layers=(layer,)).validate()


def test_layers_of_one_group_lie_apart_and_of_two_groups_need_not() -> None:
    memory = z(6, 4, 16, 12)
    for other in (memory, memory[2:4], memory[::2]):
        with pytest.raises(LayoutError, match=r"layer a part . and layer b part . of KV group 0 share bytes: .*once"):
            KVLayout.from_tensors({"a": memory, "b": other}, ATTENTION)
        specs = {"a": ATTENTION, "b": LayerSpec((0, 4), 8, 16, group=1)}
        assert len(KVLayout.from_tensors({"a": memory, "b": other}, specs).layers) == 2
    assert len(KVLayout.from_tensors({"a": memory[:3], "b": memory[3:], "c": z(2, 4, 16, 12)}, ATTENTION).layers) == 3
    with pytest.raises(LayoutError, match="share bytes"):
        KVLayout.from_tensors({"a": memory[:4], "b": memory[3:]}, ATTENTION)


@pytest.mark.parametrize("order", list(itertools.permutations("LBHN")))
def test_layers_may_interleave_in_any_order(order: tuple[str, ...]) -> None:
    """Three layers in one allocation whose axes are nested in any of the 24 orders, also head by head."""
    size = {"L": 3, "B": 5, "H": 4, "N": 16}
    whole = z(*(size[axis] for axis in order), 12).transpose(*(order.index(axis) for axis in "LBHN"), 4)
    layout = KVLayout.from_tensors({str(i): whole[i] for i in range(3)}, LayerSpec((0, 4), 8, 16, dims="BHNC"))
    moved = msgspec.structs.replace(layout.layers[0].planes[0], offset=layout.layers[1].planes[0].offset + 2)
    layers = (msgspec.structs.replace(layout.layers[0], planes=(moved,)), *layout.layers[1:])
    with pytest.raises(LayoutError, match=r"share bytes|of region 0"):
        msgspec.structs.replace(layout, layers=layers).validate()


def test_arrays_of_objects_are_refused() -> None:
    for dtype in (object, [("a", "u1"), ("b", object)]):
        with pytest.raises(LayoutError, match="need a torch tensor or an array of numbers"):
            read(np.zeros((3, 4, 16, 12), dtype))


@pytest.mark.needs("torch")
def test_tensors_without_plain_memory_are_refused() -> None:
    import torch

    with pytest.raises(LayoutError, match=r"layout torch.sparse_coo on cpu, need a dense one"):
        read(torch.zeros(3, 4, 16, 12).to_sparse())
    with pytest.raises(LayoutError, match="on meta has no memory"):
        read(torch.zeros(3, 4, 16, 12, device="meta"))
