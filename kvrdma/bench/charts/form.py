"""What a page needs of a saved report: checked once, where it is read. Further keys are of no concern."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""NaN is within no bounds."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]


class _Stat(msgspec.Struct):
    best: Number
    median: Number


class _Median(msgspec.Struct):
    median: Number


class _Case(msgspec.Struct):
    pattern: Literal["fragmented", "contig", "remote_contig"]
    block_bytes: Size
    rows: Count
    rows_posted: Count
    blocking_us: _Median
    total_ms: _Median
    gb_per_s: _Stat
    memcpy_ratio: Number


class _Latency(msgspec.Struct):
    nbytes: Size
    depth: Count
    cdf_us: list[Number]


class Link(msgspec.Struct, tag_field="kind", tag="link"):
    """Of `kvrdma link-test`."""

    transport: str
    one_sided: bool
    verified: bool
    cases: Annotated[list[_Case], msgspec.Meta(min_length=1)]
    latency: _Latency | None = None


class _Spread(msgspec.Struct):
    p50: Number | None
    p99: Number | None


class _Part(msgspec.Struct):
    mean: Number | None
    p50: Number | None


class _Split(msgspec.Struct):
    plan: _Part
    post: _Part
    wait: _Part
    reshape: _Part


class _Rank(msgspec.Struct):
    rank: str
    host: str
    gb_per_s: Number
    pulls: Count
    pull_ms: _Spread
    split_ms: _Split
    fence_rejections: Count


class _Total(msgspec.Struct):
    gb_per_s: Number


class _Rival(msgspec.Struct):
    name: str
    rows: Count
    block_bytes: Count
    verified: bool
    gb_per_s: _Median | None = None
    error: str = ""

    def __post_init__(self) -> None:
        if not (self.gb_per_s if self.verified else self.error):
            raise ValueError("Expected `gb_per_s` if verified, else `error`")


class _Samples(msgspec.Struct):
    pull_ms: list[Number] = []


class Bench(msgspec.Struct, tag_field="kind", tag="bench"):
    """Of `kvrdma bench`."""

    verified: bool
    total: _Total
    ranks: list[_Rank]
    rivals: list[_Rival] = []
    samples: _Samples = msgspec.field(default_factory=_Samples)


class Model(msgspec.Struct, tag_field="kind", tag="simulate"):
    """Of `kvrdma bench --simulate`."""

    result: dict[str, Any]


def kind_of(report: object) -> str:
    """Give the kind of a report.

    Raises:
        ValueError: it is none; says which key is wrong, and how.
    """
    form = msgspec.convert(report, type=Link | Bench | Model)
    return str(form.__struct_config__.tag)
