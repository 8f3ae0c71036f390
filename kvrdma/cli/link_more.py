"""The options of `kvrdma link-test` beyond single reads, and what is done for each."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvrdma.bench.link import Link, LinkOptions, OpenedLink
from kvrdma.bench.link_more import (
    chaos,
    measure_latency,
    measure_reverse,
    measure_streams,
    soak,
    soak_speeds,
)
from kvrdma.bench.patterns import Case, Shape
from kvrdma.bench.report import LinkReport
from kvrdma.bench.spawned_peer import Control
from kvrdma.cli.exits import check_place
from kvrdma.cli.numbers import Finite
from kvrdma.errors import ConfigError, DataError
from kvrdma.transport import open_transport

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_LATENCY_READS = 20_000
_MOST_S = 3.6e7


class Duration(click.ParamType[float]):
    """A time: ``30s``, ``10m``, ``2h``."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read it; a usage error where that is impossible."""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", str(value).strip().lower())
        if not match or not float(match[1]):
            self.fail(f"{value!r} is not a time such as 30s, 10m or 2h", param, ctx)
        seconds = float(match[1]) * _UNITS_S[match[2]]
        if seconds > _MOST_S:
            self.fail(f"{value!r} is more than {_MOST_S / 3600:g}h", param, ctx)
        return seconds


_OPTIONS = (
    click.option("--direction", type=click.Choice(["get", "both"]), default="get", show_default=True,
                 help="get: this side reads. both: afterwards the peer reads from here, too."),
    click.option("--streams", type=click.IntRange(1, 64), default=1, show_default=True,
                 help="Also read the first case over so many connections at once."),
    click.option("--latency", "latency_nbytes", type=click.IntRange(8, 1 << 20), metavar="BYTES",
                 help="Also time single reads of so many bytes, a multiple of 8: percentiles and a histogram."),
    click.option("--depth", type=click.IntRange(1, 1024), default=1, show_default=True,
                 help="Reads in flight, with --latency."),
    click.option("--soak", "soak_s", type=Duration(), metavar="DURATION", help="Also read and verify so long: 10m."),
    click.option("--rate", type=Finite(0.001, 1e6), metavar="GB/S", help="At most, with --soak."),
    click.option("--chaos", "with_chaos", is_flag=True,
                 help="Also end the peer (of `connect`: its end of the link) in mid-read, and meet it again."),
    click.option("--save", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
                 help="Write the report (JSON), for `kvrdma report`."),
)  # fmt: skip


def more_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class More:
    """What was asked for beyond single reads."""

    reverse: bool = False
    streams: int = 1
    latency_nbytes: int | None = None
    depth: int = 1
    soak_s: float | None = None
    rate_bytes: float | None = None
    chaos: bool = False
    save: Path | None = None

    def pool_nbytes(self, nbytes: int) -> int:
        """Give the size of a pool that also has room for the small reads."""
        return max(nbytes, 2 * self.depth * (self.latency_nbytes or 0))


def read_more(values: Mapping[str, Any], given: set[str]) -> More:
    """Turn parsed options into what is asked for.

    Raises:
        ConfigError: an option has no effect without another one; nothing can be saved where it says.
    """
    check_place("--save", values["save"])
    if "rate" in given and values["soak_s"] is None:
        raise ConfigError("--rate only with --soak")
    if "depth" in given and values["latency_nbytes"] is None:
        raise ConfigError("--depth only with --latency")
    if values["latency_nbytes"] is not None and values["latency_nbytes"] % 8:
        raise ConfigError(f"--latency {values['latency_nbytes']} is not a multiple of 8")
    rate = values["rate"]
    return More(
        reverse=values["direction"] != "get",
        streams=values["streams"],
        latency_nbytes=values["latency_nbytes"],
        depth=values["depth"],
        soak_s=values["soak_s"],
        rate_bytes=None if rate is None else rate * 1e9,
        chaos=values["with_chaos"],
        save=values["save"],
    )


@dataclass(frozen=True, slots=True)
class Peers:
    """How to end the peer and to meet the next one."""

    control: Callable[[], Control]
    """Gives the way to the peer as it is now."""
    kill: Callable[[Link], None] | None
    """Ends it; None: it lives in this process."""


def measure_more(more: More, opened: OpenedLink, case: Case, peers: Peers, options: LinkOptions) -> dict[str, Any]:
    """Measure what was asked for on an open link; with soak or chaos it is closed afterwards.

    Returns:
        Fields of ``LinkReport``.

    Raises:
        KVRDMAError: something failed; wrong bytes are in the reports.
    """
    link = opened.link
    found: dict[str, Any] = {}
    if more.reverse:
        found["reverse"] = measure_reverse(link, case, options.iters)
    if more.streams > 1:
        found["streams"] = measure_streams(link, case, more.streams, options.iters)
    if more.latency_nbytes:
        found["latency"] = measure_latency(link, more.latency_nbytes, more.depth, _LATENCY_READS)
    name, pool_nbytes = link.transport.name, link.pool.nbytes

    def again() -> Link:
        transport = open_transport(name, require_one_sided=options.require_one_sided)
        return Link(peers.control(), transport, pool_nbytes, options)

    if more.soak_s:
        link.close()
        tell = lambda text: click.echo(f"soak: {text}", err=True)  # noqa: E731 - one line
        found["soak"] = soak(again, case, more.soak_s, more.rate_bytes, tell)
    if more.chaos:
        if peers.kill is None:
            raise ConfigError(f"--chaos needs a peer of its own, and {name} reaches no further than this process")
        kill, victim = peers.kill, again() if more.soak_s else link
        found["chaos"] = chaos(victim, case, lambda: kill(victim), again)
    return found


def latency_case(more: More) -> tuple[Case, ...]:
    """Give the case that makes the pools large enough for the small reads."""
    if not more.latency_nbytes:
        return ()
    return (Case("contig", Shape(1, more.depth, more.latency_nbytes)),)


def wrong_of(report: LinkReport) -> list[str]:
    """List what the reports say of wrong bytes."""
    parts = {"other direction": report.reverse, "streams": report.streams, "latency": report.latency,
             "after the restart": report.chaos}  # fmt: skip
    wrong = [f"{name}: wrong bytes" for name, part in parts.items() if part is not None and not part.verified]
    return wrong + (list(report.soak.wrong) if report.soak else [])


def finish(report: LinkReport, found: dict[str, Any]) -> tuple[LinkReport, DataError | None]:
    """Add what was found to the report, and judge it."""
    import msgspec

    whole = msgspec.structs.replace(report, **found)
    wrong = wrong_of(whole)
    whole = msgspec.structs.replace(whole, verified=whole.verified and not wrong)
    return whole, DataError("\n".join(["bytes arrived that are not the peer's:", *wrong])) if wrong else None


def print_more(report: LinkReport) -> None:
    """Print what was measured beyond single reads, for people."""
    lines = []
    if report.reverse:
        r = report.reverse
        lines.append(f"peer reads from here: {r.gb_per_s.median:.2f} GB/s by {r.via} ({r.pattern}, {r.block_bytes} B)")
    if report.streams:
        s = report.streams
        lines.append(f"{s.streams} streams: {s.gb_per_s.median:.2f} GB/s ({s.pattern}, blocks of {s.block_bytes} B)")
    if report.latency:
        t = report.latency
        marks = ", ".join(f"{'' if name == 'max' else 'p'}{name} {us:.1f}" for name, us in t.percentiles_us.items())
        lines.append(f"{t.nbytes} B reads, {t.depth} in flight: {marks} µs; {t.reads_per_s:.0f} reads/s")
        most = max(count for _, count in t.histogram)
        lines += [f"  <= {bound:10.1f} µs {count:7d} {'#' * round(40 * count / most)}" for bound, count in t.histogram]
    if report.soak:
        k = report.soak
        speeds = soak_speeds(k.gb_per_s, k.average_gb_per_s)
        lines.append(
            f"soak: {k.reads} reads in {k.seconds:.0f} s, {speeds}, p99 {k.percentiles_ms['99']:.1f} ms, "
            f"failures {k.failures or 0}, wrong {len(k.wrong)}, memory {k.rss_growth_kib:+d} KiB, "
            f"descriptors {k.descriptors_growth:+d}"
        )
    if report.chaos:
        c = report.chaos
        noticed = f"{c.error} {c.noticed_ms:.0f} ms after the end of the peer"
        lines.append(f"chaos: {noticed}; recovered in {c.recovered_ms:.0f} ms")
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def with_room(cases: tuple[Case, ...], more: More) -> tuple[Case, ...]:
    """Give the cases, the last one of which decides the size of the pools, if the small reads need more."""
    extra = latency_case(more)
    largest = max(case.shape.pool_nbytes for case in cases)
    return (*cases, *(case for case in extra if case.shape.pool_nbytes > largest))
