"""`kvrdma bench`: requests between engines of many processes and hosts, and the model of very many."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table

from kvrdma.bench.cluster.exchange import from_launcher, node_rank
from kvrdma.bench.cluster.rank import START_S, address_towards
from kvrdma.bench.cluster.run import Seat, failure_of, run_rank
from kvrdma.bench.cluster.scenario import Scenario, load_scenario, make_scenario
from kvrdma.bench.cluster.simulate import Links, simulate
from kvrdma.cli.bench_model import lines_of
from kvrdma.cli.exits import JsonCommand, check_place, run, save_json, whole_process
from kvrdma.cli.numbers import Finite
from kvrdma.cli.terminal import Terminal
from kvrdma.config import Config
from kvrdma.errors import ConfigError, KVRDMAError

_OF_THE_MODEL = ("engines", "latency_us", "gb_per_s", "row_ns")
_PARTS = ("plan", "post", "wait", "reshape")
_EPILOG = """\b
Examples:
  torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 \\
      -m kvrdma.bench examples/bench/two-nodes.toml --save run.json
  kvrdma bench --simulate --engines 1000 --set producer.tp=8 --set consumer.tp=8
  kvrdma report run.json

\b
Processes become ranks in order: producers first, engine by engine, then consumers. On several
hosts set KVRDMA_SECRET everywhere. Rank 0 prints the report. Where a rank fails, torchrun itself
ends with 1, whatever the rank ended with, and prints a traceback of its own below the reason.

\b
A scenario, with every key and its default; --set names them producer.tp, prompt.kind:
  model = "llama-3.1-8b"  # or another name that link-test takes as --model, or a table (without dtype, mla: these):
  # model = { layers = 32, kv_heads = 8, head_dim = 128, dtype = "bfloat16", mla = false }
  requests = 64
  fragmentation = 1.0     # share of the blocks that lie at random; 0: all consecutive
  transports = []         # best first; none: KVRDMA_TRANSPORTS, or all that work
  seed = 1                # of lengths, arrivals, failures and block numbers
  timeout_s = 60.0        # of one pull; all waits derive from it
  verify = true           # compare every byte
  [producer]              # and [consumer], alike
  engines = 1
  tp = 1
  dcp = 1                 # decode context parallel, within tp
  pp = 1
  interleave = 1          # successive tokens on one rank of dcp
  block = 16              # tokens
  layout = "HND"          # or NHD
  [prompt]
  kind = "fixed"          # or uniform, lognormal
  tokens = 8192           # fixed: the length; lognormal: the mean
  least = 1               # uniform, lognormal: bounds
  most = 131072
  sigma = 0.5             # lognormal: of the logarithm
  [arrival]
  kind = "closed"         # concurrency requests always under way; or poisson: at most so many
  concurrency = 4         # per consumer engine
  rate = 10.0             # poisson: requests a second, over all engines
  [failures]              # shares of the requests
  withdraw = 0.0          # the producer takes it back while it is read, and overwrites it
  abort = 0.0             # the consumer gives up at once
  unreachable = 0.0       # nobody listens where the reference points
  restart = false         # not a share: the first producer engine is closed and opened anew
  [rivals]                # Python of an environment that has the library; empty: without
  nixl = ""
  mooncake = ""
  rounds = 5              # reads of the same rows, each

\b
Exit codes:
  0    every byte was right, and nothing failed that the scenario did not provoke
  1    pulls failed that the scenario did not provoke, or another error
  2    wrong options, scenario or settings
  3    a rank did not come, or was lost
  6    wrong bytes
  74   the output cannot be written
  130  interrupted
  141  the reader of the output has gone
"""


@click.command("bench", cls=JsonCommand, epilog=_EPILOG)
@click.argument("scenario_file", metavar="[SCENARIO.toml]", type=click.Path(path_type=Path), required=False)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change the scenario: consumer.tp=2, prompt.kind=uniform, arrival.rate=50. May be repeated.",
)
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Write the report (JSON) to a file.")
@click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object on stdout, at rank 0.")
@click.option(
    "--simulate", "simulated", is_flag=True, help="Model many engines in this process instead of moving bytes."
)
@click.option(
    "--engines",
    type=click.IntRange(2, 100_000),
    default=1000,
    show_default=True,
    help="Engines of the model, half of them producers.",
)
@click.option(
    "--latency-us",
    type=Finite(0, 1e9),
    default=5.0,
    show_default=True,
    help="Of the model's links, µs.",
)
@click.option(
    "--gb-per-s",
    type=Finite(0.001, 1e6),
    default=50.0,
    show_default=True,
    help="Of each rank's link in the model, in 10^9 bytes.",
)
@click.option(
    "--row-ns",
    type=Finite(0, 1e9),
    default=100.0,
    show_default=True,
    help="Cost of a row in the model, ns.",
)
@click.pass_context
def bench(  # noqa: PLR0913, PLR0917 - click passes every option by name
    ctx: click.Context,
    scenario_file: Path | None,
    changes: tuple[str, ...],
    save: Path | None,
    engines: int,
    latency_us: float,
    gb_per_s: float,
    row_ns: float,
    *,
    as_json: bool,
    simulated: bool,
) -> None:
    """Move the KV cache of many requests between engines and say how fast and how right it was.

    Launched by torchrun, one process per rank; SCENARIO.toml says what engines and requests there are.
    """

    def work() -> KVRDMAError | None:
        typed = [name for name in _OF_THE_MODEL if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE]
        if typed and not simulated:
            options = " ".join(f"--{name.replace('_', '-')}" for name in typed)
            raise ConfigError(f"{options} only with --simulate")
        scenario = read_scenario(scenario_file, changes)
        if simulated:
            check_place("--save", save)
            report = simulate(scenario, engines, Links(latency_us * 1e-6, gb_per_s * 1e9, row_ns * 1e-9))
            return show(report, save, as_json=as_json)
        return _run(scenario, save, as_json=as_json)

    run("bench", work, as_json=as_json)


def _run(scenario: Scenario, save: Path | None, *, as_json: bool) -> KVRDMAError | None:
    exchange, number, world = from_launcher(os.environ, START_S)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if number == 0:
        check_place("--save", save)
    local = address_towards(host, port)
    seat = Seat(number, world, node_rank(), None if local.startswith("127.") or local == "::1" else local)
    report = run_rank(scenario, seat, exchange, Config.from_env(), lambda text: click.echo(text, err=True))
    if report is None:
        return None
    unsaved = show(report, save, as_json=as_json)
    return failure_of(report) or unsaved


def read_scenario(path: Path | None, changes: tuple[str, ...]) -> Scenario:
    """Read a scenario file and apply ``KEY=VALUE`` changes.

    Raises:
        ConfigError: file or change cannot be used.
    """
    import msgspec

    values: dict[str, Any] = msgspec.to_builtins(load_scenario(path)) if path else {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"--set {change!r} is not KEY=VALUE")
        at = values
        *folders, name = key.strip().split(".")
        for folder in folders:
            at = at.setdefault(folder, {})
            if not isinstance(at, dict):
                raise ConfigError(f"--set {change!r}: {folder} is no table")
        try:
            at[name] = json.loads(text)
        except ValueError:
            at[name] = text
    return make_scenario(values, str(path or "of --set"))


def show(report: dict[str, Any], save: Path | None, *, as_json: bool) -> ConfigError | None:
    """Print a report, and save it; gives what was wrong with that."""
    if as_json:
        click.echo(json.dumps({key: value for key, value in report.items() if key != "samples"}))
    else:
        _print(report)
    return save_json("--save", save, report)


def _print(report: dict[str, Any]) -> None:
    console = Terminal(width=None if sys.stdout.isatty() else 120, highlight=False)
    if report["kind"] == "simulate":
        for line in lines_of(report["result"]):
            console.print(line)
        return
    _print_run(console, report)


def _print_run(console: Terminal, report: dict[str, Any]) -> None:
    total = report["total"]
    console.print(
        f"{total['requests_done']} of {total['requests']} requests, {total['tokens']} tokens, "
        f"{total['nbytes'] / 1e9:.2f} GB in {total['busy_seconds']:.2f} s: [bold]{total['gb_per_s']:.2f} GB/s[/]; "
        f"{total['rows']} rows, {total['rows_posted']} after merging; {total['fence_rejections']} fence rejections"
    )
    columns = ("rank", "GB/s", "pulls", "p50 ms", "p99 ms", *(f"{part} ms" for part in _PARTS), "results")
    table = Table(*columns, box=None, padding=(0, 1, 0, 0))
    for rank in report["ranks"]:
        split = rank["split_ms"]
        parts = [split[part]["p50"] for part in _PARTS]
        numbers = [rank["pull_ms"]["p50"], rank["pull_ms"]["p99"], *parts]
        results = ", ".join(f"{count} {name}" for name, count in rank["results"].items())
        cells = ["-" if n is None else f"{n:.2f}" for n in numbers]
        table.add_row(f"{rank['host']} {rank['rank']}", f"{rank['gb_per_s']:.2f}", str(rank["pulls"]), *cells, results)
    console.print(table)
    for row in report["rivals"]:
        speed = f"{row['gb_per_s']['median']:.2f} GB/s" if row["verified"] else f"failed: {row['error']}"
        console.print(f"{row['name']}: {row['rows']} x {row['block_bytes']} bytes to {row['readers']} ranks: {speed}")
    for name, counts in report["nics"].items():
        console.print(f"{name}: {counts['received'] / 1e6:.1f} MB in, {counts['sent'] / 1e6:.1f} MB out", style="dim")
    console.print("every byte verified" if report["verified"] else "[bold red]not verified[/]")


def main() -> None:
    """Run as ``python -m kvrdma.bench``."""
    with whole_process():
        bench(prog_name="kvrdma bench")
