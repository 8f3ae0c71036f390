"""How `kvrdma link-test` talks: progress while it runs, a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrdma.bench.link import LinkResult
from kvrdma.bench.patterns import Case
from kvrdma.bench.report import CaseReport
from kvrdma.cli.terminal import Terminal

_PLAIN_WIDTH = 120
_MIN_WIDTH = 80
_UNSTEADY = 3.0
"""A best read so many times faster than the median says something of the hour, not of the link."""
_LEGEND = (
    "connect: exchange of keys until the peer can be read. first read: the first rows after that, with all set-up.",
    "Table: medians. posted: rows after merging adjacent ones. held: how long posting a read held its caller.",
    "memcpy: speed as a share of one thread's that copies the same rows within this process, in turns with the reads.",
)


def size_text(nbytes: int) -> str:
    """Write a size in the largest binary unit that divides it: ``4 KiB``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


@contextmanager
def progress_of(cases: Sequence[Case], *, as_json: bool) -> Iterator[Callable[[int, Case], None]]:
    """Give the function that is told of each case as it begins.

    A bar on stderr where that is a terminal; otherwise plain lines, on stderr if stdout is for JSON.
    """
    if not sys.stderr.isatty():
        stream = sys.stderr if as_json else sys.stdout

        def line(index: int, case: Case) -> None:
            stream.write(f"{index + 1}/{len(cases)} {_label(case)}\n")
            stream.flush()

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(cases))
        yield lambda index, case: bar.update(task, completed=index, description=_label(case))


def _label(case: Case) -> str:
    return f"{case.pattern} {case.shape.rows} x {size_text(case.shape.block_bytes)}"


def print_result(result: LinkResult, request: str) -> None:
    """Print the table and what it means."""
    console = Terminal(width=max(_MIN_WIDTH, Terminal().width) if sys.stdout.isatty() else _PLAIN_WIDTH)
    report = result.report
    kind = "one-sided" if report.one_sided else "emulated by the peer's CPU"
    console.print(
        f"[bold]{report.transport}[/] via {result.via}: {kind}, memory {report.device}, kvrdma {report.kvrdma}"
    )
    if report.ucx:
        console.print(f"UCX {report.ucx['version']} from {report.ucx['library']}", highlight=False)
    console.print(f"connect {report.connect_ms:.1f} ms, first read {report.first_read_ms:.1f} ms")
    console.print(_table(report.cases))
    if note := unsteady(report.cases):
        console.print(note, style="yellow", highlight=False)
    for line in _LEGEND:
        console.print(line, style="dim", highlight=False)
    if request:
        for case in report.cases:
            console.print(answer(case, request), highlight=False)


def _table(cases: Sequence[CaseReport]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("pattern", no_wrap=True)
    for heading in ("block", "rows", "posted", "MB", "GB/s", "best", "ms", "held µs", "memcpy", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in cases:
        table.add_row(*_cells(case))
    return table


def _cells(case: CaseReport) -> tuple[str, ...]:
    return (
        case.pattern,
        size_text(case.block_bytes),
        str(case.rows),
        str(case.rows_posted),
        f"{case.nbytes / 1e6:.1f}",
        f"{case.gb_per_s.median:.2f}",
        f"{case.gb_per_s.best:.2f}",
        f"{case.total_ms.median:.2f}",
        f"{case.blocking_us.median:.0f}",
        f"{case.memcpy_ratio:.2f}x",
        "verified" if case.verified else "[bold red]WRONG[/]",
    )


def unsteady(cases: Sequence[CaseReport]) -> str:
    """Say that rows of the table are slower than the link can be, or ``""``."""
    ratios = [case.gb_per_s.best / case.gb_per_s.median for case in cases if case.gb_per_s.median]
    rows = sum(ratio > _UNSTEADY for ratio in ratios)
    if not rows:
        return ""
    which = "a row is" if rows == 1 else f"{rows} rows are"
    return (
        f"{which} unsteady, best up to {max(ratios):.0f} times GB/s; something may have kept the host busy: repeat it"
    )


def answer(case: CaseReport, request: str) -> str:
    """Say how long a request's KV cache takes: ``8192 tokens = X MB in N rows = Y ms``."""
    return (
        f"{request} = {case.nbytes / 1e6:.1f} MB in {case.rows} rows = {case.total_ms.median:.1f} ms "
        f"({case.pattern}, {case.rows_posted} after merging)"
    )
