"""`kvrdma store`: run a remote KV store, and look at one."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import click

from kvrdma.bench.room import free_nbytes, gib
from kvrdma.cli.exits import JsonCommand, run
from kvrdma.cli.link_options import Size
from kvrdma.cli.serving import serve_until
from kvrdma.config import Config
from kvrdma.errors import ConfigError, MessageError
from kvrdma.sidechannel import Endpoint, SideChannelClient
from kvrdma.store.numbers import Exporter
from kvrdma.store.server import StoreServer, freeze_gc_heap
from kvrdma.wire import AskStore, StoreNumbers

_EPILOG = """\b
Examples:
  KVRDMA_SECRET=... kvrdma store serve --capacity 64GiB --bind 10.0.0.7:7480
  kvrdma store stats HOST:PORT --json
"""
_SERVE_EPILOG = """\b
Example:
  KVRDMA_SECRET=... kvrdma store serve --capacity 64GiB --bind 10.0.0.7:7480

\b
Exit codes:
  0    stopped by SIGINT or SIGTERM
  1    ended by a defect, or another error
  2    wrong options or settings, or more memory than is free
  3    the name to bind cannot be looked up
"""
_STATS_EPILOG = """\b
Example:
  kvrdma store stats HOST:PORT --json

\b
Exit codes:
  0    printed
  1    what listens there is no store
  2    wrong options or settings
  3    nobody answers at HOST:PORT
  4    KVRDMA_SECRET is another one there, or set on one side only
  5    another version of kvrdma
  74   the output cannot be written
  130  interrupted
  141  the reader of the output has gone
"""


@click.group(epilog=_EPILOG)
def store() -> None:
    """Keep KV blocks of many engines in the memory of one process, filled and read by one-sided reads."""


@store.command(epilog=_SERVE_EPILOG)
@click.option("--capacity", type=Size(most=1 << 50), default="4GiB", show_default=True, help="Memory for blocks.")
@click.option("--bind", default="127.0.0.1:7480", show_default=True, metavar="HOST:PORT", help="Where users ask.")
@click.option("--advertise", metavar="HOST", help="The address users reach, if not that of --bind.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve numbers to Prometheus there.")
@click.option(
    "--max-families",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Models, splits over ranks and block sizes at the same time.",
)
@click.option("--insecure", is_flag=True, help="Listen beyond loopback without KVRDMA_SECRET.")
def serve(
    capacity: int, bind: str, advertise: str | None, metrics: str | None, max_families: int, *, insecure: bool
) -> None:  # fmt: skip
    """Run a store until interrupted. What it holds is gone afterwards.

    Beside the port of --bind each kind of cache is read through ports of its own, chosen freely.
    Further settings are KVRDMA_* variables: transports, the secret, leases.
    """
    stops = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # before any thread: none of them takes the signal

    def work() -> None:
        config = Config.from_env()
        config = replace(
            config,
            bind=bind,
            advertise=advertise or config.advertise,
            insecure=insecure or config.insecure,
        )
        _serve(capacity, max_families, config, metrics, stops)

    try:
        run("store serve", work, as_json=False)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(
    capacity: int, max_families: int, config: Config, metrics: str | None, stops: set[signal.Signals]
) -> None:  # fmt: skip
    free = free_nbytes()
    if free is not None and capacity > free:
        raise ConfigError(f"--capacity {gib(capacity)} is more than the {gib(free)} of memory that are free here")
    with ExitStack() as stack:
        server = stack.enter_context(StoreServer(capacity, config, max_families=max_families))
        how = "encrypted, KVRDMA_SECRET needed" if config.secret else "no secret, not encrypted"
        if metrics is not None:
            exporter = Exporter(server, Endpoint.parse(metrics))
            stack.callback(exporter.close)
            how += f"; metrics at http://{exporter.endpoint}/metrics"
        freeze_gc_heap()
        click.echo(f"store of {gib(capacity)} at {server.endpoint} ({how})")
        serve_until(stops, server, "store")


@store.command(cls=JsonCommand, epilog=_STATS_EPILOG)
@click.argument("endpoint", metavar="HOST:PORT")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def stats(endpoint: str, *, as_json: bool) -> None:
    """Print the numbers of the store at HOST:PORT: counts since its start, bytes and seconds."""
    run("store stats", lambda: _stats(endpoint, as_json=as_json), as_json=as_json)


def _stats(endpoint: str, *, as_json: bool) -> None:
    config = Config.from_env()
    with SideChannelClient(Endpoint.parse(endpoint), config.secret) as client:
        reply = client.request(AskStore(), config.control_timeout_s)
    if not isinstance(reply, StoreNumbers):
        raise MessageError(f"{endpoint} answered {type(reply).__name__}: it is no store")
    if as_json:
        click.echo(json.dumps({"kvrdma": reply.kvrdma, **reply.numbers}))
        return
    width = max(map(len, reply.numbers))
    for name, value in reply.numbers.items():
        click.echo(f"{name.ljust(width)}  {_text(name, value)}")
    click.echo(f"{'hit rate'.ljust(width)}  {_rate(reply.numbers)}")


def _text(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return gib(int(value))
    return f"{value:.2f} s" if name.endswith("_seconds") else f"{value:g}"


def _rate(numbers: Mapping[str, float]) -> str:
    asked = numbers.get("looked_up", 0)
    return f"{100 * numbers.get('hits', 0) / asked:.1f} %" if asked else "-"
