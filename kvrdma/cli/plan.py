"""`kvrdma plan`: shows who would read what from whom between two engines that need not exist."""

from __future__ import annotations

import json
from typing import Any, TypedDict, Unpack, cast

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrdma.errors import KVRDMAError
from kvrdma.plan.planner import PageReshape, TokenRange
from kvrdma.plan.report import Link, Pair, RankReport, owners, report_pair
from kvrdma.plan.sketch import CacheSketch, SketchFormat
from kvrdma.topology import EngineShape, RankId

_FORMATS = click.Choice(["HND", "NHD", "HND-outer", "NHD-outer", "CPU"])
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_white", "bright_black")
_MAX_COLUMNS, _MAX_DRAWN, _MAX_HEADS = 32, 8, 16
_GOOD_BLOCK = 64


class Options(TypedDict):
    """The options of the command, as click passes them."""

    p_tp: int
    d_tp: int
    p_dcp: int
    d_dcp: int
    p_pp: int
    d_pp: int
    interleave: int
    kv_heads: int
    mla: bool
    p_block: int
    d_block: int
    p_layout: str
    d_layout: str
    layers: int
    head_dim: int
    itemsize: int
    tokens: int
    cached: int
    link: float
    row_ns: float
    json: bool


def _sizes(command: Any) -> Any:  # noqa: ANN401 -- click decorators are untyped here
    """Add the options that come once per side, p- for producer and d- for consumer."""
    for side, name in (("d", "consumer"), ("p", "producer")):
        layout = click.option(f"--{side}-layout", type=_FORMATS, default="HND", help=f"{name}'s page format")
        command = layout(command)
        for size, default, text in (
            ("block", 16, "tokens of a block"),
            ("pp", 1, "pipeline parallel size"),
            ("dcp", 1, "decode context parallel size, within tp"),
            ("tp", 1, "tensor parallel size"),
        ):
            option = click.option(
                f"--{side}-{size}",
                type=click.IntRange(min=1),
                default=default,
                show_default=True,
                help=f"{name}'s {text}",
            )
            command = option(command)
    return command


@click.command("plan")
@_sizes
@click.option(
    "--interleave",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="tokens in a row on a dcp rank",
)
@click.option("--kv-heads", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--mla", is_flag=True, help="one latent of head-dim elements instead of kv heads")
@click.option("--layers", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--head-dim", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--itemsize", type=click.IntRange(min=1), default=2, show_default=True, help="bytes of an element")
@click.option("--tokens", type=click.IntRange(min=0), default=4096, show_default=True)
@click.option("--cached", type=click.IntRange(min=0), default=0, help="tokens the consumer holds already")
@click.option(
    "--link",
    type=click.FloatRange(min=0, min_open=True),
    default=50.0,
    show_default=True,
    help="GB/s of a rank",
)
@click.option("--row-ns", type=click.FloatRange(min=0), default=600.0, show_default=True, help="cost of one row")
@click.option("--json", is_flag=True, help="print one JSON object")
def plan_command(**options: Unpack[Options]) -> None:
    """Show what each consumer rank reads from each producer rank, and what that costs."""
    try:
        pair = _pair(options)
        reports = report_pair(pair)
    except KVRDMAError as error:
        raise click.ClickException(str(error)) from error
    if options["json"]:
        click.echo(json.dumps(as_json(pair, reports)))
        return
    _print(pair, reports, Link(options["link"], options["row_ns"]))


def _pair(options: Options) -> Pair:
    names = tuple(f"layer.{i}" for i in range(options["layers"]))
    if options["cached"] > options["tokens"]:
        raise click.BadParameter(f"--cached {options['cached']} is more than --tokens {options['tokens']}")

    def engine(tp: int, dcp: int, pp: int) -> EngineShape:
        if pp > len(names):
            raise click.BadParameter(f"{pp} pipeline stages for {len(names)} layers: use fewer stages")
        stages = tuple(tuple(part.tolist()) for part in np.array_split(np.array(names), pp)) if pp > 1 else ()
        interleave = options["interleave"] if dcp > 1 else 1
        return EngineShape(tp, options["kv_heads"], dcp, interleave, options["mla"], stages=stages)

    content = options["head_dim"] * (1 if options["mla"] else 2)

    def cache(layout: str, block: int) -> CacheSketch:
        return CacheSketch(cast("SketchFormat", layout), block, 1, names, content, options["itemsize"])

    return Pair(
        engine(options["d_tp"], options["d_dcp"], options["d_pp"]),
        engine(options["p_tp"], options["p_dcp"], options["p_pp"]),
        cache(options["d_layout"], options["d_block"]),
        cache(options["p_layout"], options["p_block"]),
        TokenRange(options["cached"], options["tokens"]),
    )


def _number(shape: EngineShape, rank: RankId) -> int:
    """Ranks counted over all stages."""
    return rank.pp_rank * shape.num_ranks + rank.rank


def as_json(pair: Pair, reports: tuple[RankReport, ...]) -> dict[str, Any]:
    """The report as plain data; ``reshape`` is the one that moves most bytes."""
    return {
        "ranks": [
            {
                "rank": _number(pair.consumer, report.rank),
                "sources": [
                    {
                        "remote_rank": _number(pair.producer, s.source.rank),
                        "heads": list(s.source.heads),
                        "tokens": s.tokens,
                        "rows": s.rows,
                        "rows_posted": s.rows_posted,
                        "nbytes": s.nbytes,
                    }
                    for s in report.sources
                ],
                "reshape": next(
                    ({"shape": list(r.reshape.shape), "axes": list(r.reshape.axes)} for r in report.reshapes),
                    None,
                ),
            }
            for report in reports
        ]
    }


def _print(pair: Pair, reports: tuple[RankReport, ...], link: Link) -> None:
    console = Console()
    console.print(_summary(pair, reports))
    for report in reports[:_MAX_DRAWN]:
        console.print(_drawing(pair, report))
    if len(reports) > _MAX_DRAWN:
        console.print(f"({len(reports) - _MAX_DRAWN} more consumer ranks are not drawn)")
    for line in [*_reshape_lines(pair, reports), *_advice(pair, reports, link)]:
        console.print(line, highlight=False, soft_wrap=True)


def _summary(pair: Pair, reports: tuple[RankReport, ...]) -> Table:
    table = Table(title="reads")
    for name in ("consumer", "producer", "heads", "tokens", "rows", "posted", "MB"):
        table.add_column(name, justify="right")
    for report in reports:
        for source in report.sources:
            number = _number(pair.producer, source.source.rank)
            lo, hi = source.source.heads
            table.add_row(
                str(_number(pair.consumer, report.rank)),
                Text(str(number), style=_COLOURS[number % len(_COLOURS)]),
                f"{lo}..{hi - 1}",
                f"{source.tokens:,}",
                f"{source.rows:,}",
                f"{source.rows_posted:,}",
                f"{source.nbytes / 1e6:,.1f}",
            )
    return table


def _drawing(pair: Pair, report: RankReport) -> Table:
    """Heads down, tokens across; each cell is the producer rank its bytes come from, a dot for none."""
    split = [shape.interleave for shape in (pair.consumer, pair.producer) if shape.dcp_size > 1]
    length = pair.tokens.end - pair.tokens.start
    step = max(1, min(split) if split else -(-length // _MAX_COLUMNS))
    positions = np.arange(pair.tokens.start, pair.tokens.end, step)[:_MAX_COLUMNS]
    table = Table(title=f"consumer rank {_number(pair.consumer, report.rank)}, a column is {step} tokens", padding=0)
    table.add_column("head", justify="right")
    table.add_column(f"tokens {pair.tokens.start}..{int(positions[-1]) + step - 1 if len(positions) else 0}")
    dcp = owners(pair, report.rank, positions)
    lo, hi = pair.consumer.heads(report.rank.rank)
    for head in range(lo, min(hi, lo + _MAX_HEADS)):
        line = Text()
        for owner in dcp.tolist():
            numbers = [
                _number(pair.producer, s.source.rank)
                for s in report.sources
                if s.source.heads[0] <= head < s.source.heads[1] and pair.producer.dcp_rank(s.source.rank.rank) == owner
            ]
            line.append(
                f"{numbers[0]:>2}" if numbers else " .",
                _COLOURS[numbers[0] % len(_COLOURS)] if numbers else None,
            )
        table.add_row(str(head), line)
    if hi - lo > _MAX_HEADS:
        table.add_row("...", f"{hi - lo - _MAX_HEADS} more heads alike")
    return table


def _in_words(step: PageReshape) -> str:
    one, axes = step.reshape, step.reshape.axes
    unit = "each page" if one.count == 1 else f"each of {one.count} parts of a page, {one.stride} bytes apart"
    start = f" from byte {one.offset}" if one.offset else ""
    return (
        f"{len(step.pages):,} pages in each of {len(step.layers)} layers: {unit}{start} arrives as {one.shape} "
        f"elements of {one.itemsize} bytes and is transposed in place to {tuple(one.shape[a] for a in axes)}, "
        f"axes {axes}"
    )


def _reshape_lines(pair: Pair, reports: tuple[RankReport, ...]) -> list[str]:
    lines: dict[str, list[int]] = {}
    for report in reports:
        texts = [_in_words(step) for step in report.reshapes]
        for text in texts or ["none: every row lands in its final place"]:
            lines.setdefault(text, []).append(_number(pair.consumer, report.rank))
    return [f"reshape on ranks {', '.join(map(str, ranks))}: {text}" for text, ranks in lines.items()]


def _advice(pair: Pair, reports: tuple[RankReport, ...], link: Link) -> list[str]:
    best, worst = (max(report.times_ms(link)[i] for report in reports) for i in (0, 1))
    slowest = max(reports, key=lambda report: report.times_ms(link)[1])
    speed = f"{link.gigabytes_per_s:g} GB/s per rank and {link.row_ns:g} ns per row"
    lines = [f"time at {speed}: {best:.2f} ms with consecutive blocks, {worst:.2f} ms with fragmented ones"]
    wire, rows = link.read_ms(0, slowest.nbytes), slowest.rows * link.row_ns / 1e6
    small = min(pair.consumer_cache.block_size, pair.producer_cache.block_size)
    if rows > wire and small < _GOOD_BLOCK:
        cause = f"{slowest.rows:,} rows take {rows:.2f} ms, the bytes only {wire:.2f} ms"
        cure = f"blocks of {_GOOD_BLOCK} tokens on both sides divide the rows by {_GOOD_BLOCK // small}"
        lines.append(f"advice: with fragmented blocks of {small} tokens the link waits for rows ({cause}): {cure}")
    return lines
