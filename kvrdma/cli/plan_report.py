"""How `kvrdma plan` shows a plan: as plain data, or as a table, drawings and advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from kvrdma import __version__
from kvrdma.cli.terminal import Terminal
from kvrdma.plan.planner import PageReshape
from kvrdma.plan.report import Link, Pair, RankReport, owners, report_pair
from kvrdma.topology import EngineShape, RankId

_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_white", "bright_black")
_MAX_COLUMNS, _MAX_WIDTH, _MAX_HEADS = 32, 96, 16
_FRAME = 3
"""Lines beside and between the two columns of a drawing."""
_MAX_SINGLE = 8
"""More ranks than these are shown in groups of equal ones."""
_MAX_DRAWN = 4
_MAX_LISTED = 8
_GOOD_BLOCK = 64

Group = tuple[RankReport, ...]


def _number(shape: EngineShape, rank: RankId) -> int:
    """Ranks counted over all stages."""
    return rank.pp_rank * shape.num_ranks + rank.rank


def as_json(pair: Pair, reports: Sequence[RankReport], link: Link, inputs: dict[str, Any]) -> dict[str, Any]:
    """The report as plain data; ``reshape`` is the one that moves most bytes."""
    best, worst = _times_ms(reports, link)
    return {
        "kvrdma": __version__,
        "inputs": inputs,
        "ranks": [_rank_json(pair, report) for report in reports],
        "estimate_ms": {"consecutive": round(best, 4), "fragmented": round(worst, 4)},
        "advice": advice(pair, reports, link),
    }


def _rank_json(pair: Pair, report: RankReport) -> dict[str, Any]:
    largest = report.reshapes[0].reshape if report.reshapes else None
    return {
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
        "reshape": {"shape": list(largest.shape), "axes": list(largest.axes)} if largest else None,
    }


def print_plan(pair: Pair, reports: Sequence[RankReport], link: Link, *, every: bool) -> None:
    """Print table, drawings, reshapes, time and advice; ``every``: each rank for itself."""
    console = Terminal()
    groups = [(report,) for report in reports] if every or len(reports) <= _MAX_SINGLE else _equal_ranks(reports)
    console.print(_summary(pair, groups))
    drawn = groups if every else groups[: _MAX_SINGLE if len(reports) <= _MAX_SINGLE else _MAX_DRAWN]
    for group in drawn:
        console.print(_drawing(pair, group[0], console.width))
    if sum(len(group) for group in groups) > len(drawn):
        console.print(f"({len(drawn)} of {len(reports)} consumer ranks are drawn: --all draws all)")
    best, worst = _times_ms(reports, link)
    speed = f"{link.gigabytes_per_s:g} GB/s per rank and {link.row_ns:g} ns per row"
    time = f"time at {speed}: {best:.2f} ms with consecutive blocks, {worst:.2f} ms with fragmented ones"
    for line in [*_reshape_lines(pair, reports), time, *(f"advice: {text}" for text in advice(pair, reports, link))]:
        console.print(line, highlight=False, soft_wrap=True)


def _equal_ranks(reports: Sequence[RankReport]) -> list[Group]:
    """Group the ranks whose figures and reshapes are the same, whoever they read."""
    found: dict[object, list[RankReport]] = {}
    for report in reports:
        figures = tuple((s.tokens, s.rows, s.rows_posted, s.nbytes) for s in report.sources)
        found.setdefault((figures, tuple(map(_in_words, report.reshapes))), []).append(report)
    return [tuple(group) for group in found.values()]


def ranks_text(numbers: Sequence[int]) -> str:
    """Write rank numbers: ``0, 1``, ``0..1023`` or ``0, 2 .. 1022``."""
    distinct = sorted(set(numbers))
    steps = set(np.diff(distinct).tolist())
    if len(distinct) > 2 and steps == {1}:
        return f"{distinct[0]}..{distinct[-1]}"
    if len(distinct) <= _MAX_LISTED:
        return ", ".join(map(str, distinct))
    middle = f"{distinct[1]} .. " if len(steps) == 1 else "... "
    return f"{distinct[0]}, {middle}{distinct[-1]}"


def _summary(pair: Pair, groups: Sequence[Group]) -> Table:
    grouped = any(len(group) > 1 for group in groups)
    table = Table(title="reads", caption="tokens, rows and MB are those of one rank" if grouped else None)
    for name in ("consumer", "producer", "heads", "tokens", "rows", "posted", "MB"):
        table.add_column(name, justify="right")
    for group in groups:
        for index, source in enumerate(group[0].sources):
            table.add_row(
                ranks_text([_number(pair.consumer, report.rank) for report in group]),
                *_read_from(pair, [report.sources[index].source for report in group]),
                f"{source.tokens:,}",
                f"{source.rows:,}",
                f"{source.rows_posted:,}",
                f"{source.nbytes / 1e6:,.1f}",
            )
    return table


def _read_from(pair: Pair, sources: Sequence[Any]) -> tuple[Text, str]:
    """Which producer ranks and heads: of one rank, or of a group of equal ones."""
    numbers = [_number(pair.producer, source.rank) for source in sources]
    lo, hi = min(source.heads[0] for source in sources), max(source.heads[1] for source in sources)
    style = _COLOURS[numbers[0] % len(_COLOURS)] if len(set(numbers)) == 1 else ""
    each = sources[0].heads[1] - sources[0].heads[0]
    return Text(ranks_text(numbers), style=style), (f"{each} of " if each < hi - lo else "") + f"{lo}..{hi - 1}"


def _drawing(pair: Pair, report: RankReport, room: int) -> Table:
    """Heads down, tokens across; each cell is the producer rank its bytes come from, a dot for none."""
    lo, hi = pair.consumer.heads(report.rank.rank)
    room -= max(len("head"), len(str(hi - 1))) + _FRAME
    width = 1 + max((len(str(_number(pair.producer, s.source.rank))) for s in report.sources), default=1)
    columns = max(1, min(_MAX_COLUMNS, min(_MAX_WIDTH, room) // width))
    split = [shape.interleave for shape in (pair.consumer, pair.producer) if shape.dcp_size > 1]
    start, end = pair.tokens.start, pair.tokens.end
    step = max(1, min(split) if split else -(-(end - start) // columns))
    positions = np.arange(start, end, step)[:columns]
    name = f"consumer rank {_number(pair.consumer, report.rank)}"
    table = Table(title=f"{name}, a column is {step} tokens", padding=0)
    table.add_column("head", justify="right")
    shown = f"tokens {start}..{min(int(positions[-1]) + step, end) - 1}" if len(positions) else "no tokens"
    table.add_column(shown)
    dcp = owners(pair, report.rank, positions).tolist()
    for head in range(lo, min(hi, lo + _MAX_HEADS)):
        table.add_row(str(head), _line(pair, report, head, dcp, width))
    if hi - lo > _MAX_HEADS:
        table.add_row("...", f"{hi - lo - _MAX_HEADS} more heads alike")
    return table


def _line(pair: Pair, report: RankReport, head: int, dcp: Sequence[int], width: int) -> Text:
    of = {
        pair.producer.dcp_rank(s.source.rank.rank): _number(pair.producer, s.source.rank)
        for s in reversed(report.sources)
        if s.source.heads[0] <= head < s.source.heads[1]
    }
    line = Text()
    for owner in dcp:
        colour = _COLOURS[of[owner] % len(_COLOURS)] if owner in of else None
        line.append(f"{of.get(owner, '.'):>{width}}", colour)
    return line


def _in_words(step: PageReshape) -> str:
    one, axes = step.reshape, step.reshape.axes
    unit = "each page" if one.count == 1 else f"each of {one.count} parts of a page, {one.stride} bytes apart"
    start = f" from byte {one.offset}" if one.offset else ""
    return (
        f"{len(step.pages):,} pages in each of {len(step.layers)} layers: {unit}{start} arrives as {one.shape} "
        f"elements of {one.itemsize} bytes and is transposed in place to {tuple(one.shape[a] for a in axes)}, "
        f"axes {axes}"
    )


def _reshape_lines(pair: Pair, reports: Sequence[RankReport]) -> list[str]:
    lines: dict[str, list[int]] = {}
    for report in reports:
        texts = [_in_words(step) for step in report.reshapes]
        for text in texts or ["none: every row lands in its final place"]:
            lines.setdefault(text, []).append(_number(pair.consumer, report.rank))
    return [f"reshape on ranks {ranks_text(ranks)}: {text}" for text, ranks in lines.items()]


def _times_ms(reports: Sequence[RankReport], link: Link) -> tuple[float, float]:
    """Of the slowest rank, with consecutive and with fragmented blocks."""
    times = [report.times_ms(link) for report in reports]
    return max(best for best, _ in times), max(worst for _, worst in times)


def advice(pair: Pair, reports: Sequence[RankReport], link: Link) -> list[str]:
    """Say what would make the transfer faster, if anything: in the order of what to do first."""
    slowest = max(reports, key=lambda report: report.times_ms(link)[1])
    wire, rows = link.read_ms(0, slowest.nbytes), slowest.rows * link.row_ns / 1e6
    consumer, producer = pair.consumer_cache.block_size, pair.producer_cache.block_size
    small = min(consumer, producer)
    if rows <= wire or small >= _GOOD_BLOCK:
        return []
    lines = []
    if consumer != producer:
        lines.append(
            f"equal blocks on both sides (producer {producer}, consumer {consumer} tokens): then every block is read "
            "whole and none is put together from parts"
        )
    cause = f"{slowest.rows:,} rows take {rows:.2f} ms, the bytes only {wire:.2f} ms"
    block, advised = _advised(pair)
    if advised < slowest.rows:
        by = f"{slowest.rows / advised:.3g}, to {advised:,}"
        cure = f"blocks of {block} tokens on both sides divide the rows by {by}"
    else:
        cure = f"blocks of {block} tokens on both sides do not make them fewer"
    if slowest.times_ms(link)[0] > 2 * wire:
        when = f"with blocks of {producer} and {consumer} tokens, consecutive ones too,"
    else:
        when = f"with fragmented blocks of {small} tokens"
    lines.append(f"{when} the link waits for rows ({cause}): {cure}")
    return lines


def _advised(pair: Pair) -> tuple[int, int]:
    """Give the size of larger blocks, the same on both sides, and the most rows of a rank that is planned with them."""
    runs = math.lcm(*(shape.interleave for shape in (pair.consumer, pair.producer) if shape.dcp_size > 1))
    block = -(-_GOOD_BLOCK // runs) * runs
    consumer, producer = (replace(cache, block_size=block) for cache in (pair.consumer_cache, pair.producer_cache))
    larger = replace(pair, consumer_cache=consumer, producer_cache=producer)
    return block, max(report.rows for report in report_pair(larger))
