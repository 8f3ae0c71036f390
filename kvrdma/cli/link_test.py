"""`kvrdma link-test`: what can the link between two processes do, and does every byte arrive?"""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import click

from kvrdma.bench.choose import Candidates, connect_first, open_candidates, reaching_further
from kvrdma.bench.link import Link, LinkResult, measure
from kvrdma.bench.link_peer import LinkPeer
from kvrdma.bench.room import check_room
from kvrdma.bench.spawned_peer import Control, EstablishedControl, LocalControl, SpawnedPeer
from kvrdma.cli.exits import JsonCommand, JsonGroup, run, save_json
from kvrdma.cli.link_more import Peers, finish, measure_more, print_more, with_room
from kvrdma.cli.link_options import Test, read_options, test_options
from kvrdma.cli.link_report import print_result, progress_of
from kvrdma.cli.serving import serve_until
from kvrdma.config import Config
from kvrdma.errors import DataError, KVRDMAError, UnreachableError
from kvrdma.sidechannel import Endpoint, SideChannelClient, SideChannelServer
from kvrdma.transport import Device
from kvrdma.wire import CloseLink

PEER_DEADLINE_S = 3600.0
_EPILOG = """\b
Examples:
  kvrdma link-test --model llama-3.1-8b --tp 4
  kvrdma link-test --latency 64 --depth 8 --streams 4 --direction both --save a.json
  kvrdma link-test --soak 10m --rate 2 --chaos
  kvrdma link-test connect HOST:7471 --require-rdma

\b
Exit codes:
  0    every byte of every case was verified
  1    another error
  2    wrong options or settings
  3    nobody answers at the peer's address
  4    KVRDMA_SECRET differs, or only one side has one
  5    the two sides speak different protocol versions
  6    bytes arrived that are not the peer's
  7    the transport is not available here or there
  8    only emulated reads are possible, and --require-rdma was given
  9    no connection, a failed or late read, or the peer was lost
  74   the output cannot be written
  130  interrupted
  141  the reader of the output has gone

With --json a failure prints one object as well: kvrdma, verified (false), error,
code and message; bytes that are wrong are in the report itself.
"""
_SERVE_EPILOG = """\b
Example:
  KVRDMA_SECRET=... kvrdma link-test serve --bind 0.0.0.0:7471

\b
Exit codes:
  0    stopped by SIGINT or SIGTERM
  1    another error
  2    wrong options or settings
  3    the name to bind cannot be looked up
"""


def _typed(ctx: click.Context) -> set[str]:
    """Give the names of the options that are on the command line."""
    typed = click.core.ParameterSource.COMMANDLINE
    return {name for name in ctx.params if ctx.get_parameter_source(name) == typed}


@click.group("link-test", cls=JsonGroup, invoke_without_command=True, epilog=_EPILOG)
@test_options
@click.pass_context
def link_test(ctx: click.Context, /, **values: Any) -> None:  # noqa: ANN401 - click passes every option by name
    """Read scattered blocks from a peer's memory, verify every byte, and say how fast it is.

    Without a subcommand the peer is a new process on this host.
    """
    if ctx.invoked_subcommand is not None:
        if _typed(ctx):
            raise click.UsageError(f"options belong after {ctx.invoked_subcommand!r}, not before it")
        return
    typed = _typed(ctx)
    run("link-test", lambda: _test_here(read_options(values, Config.from_env(), typed)), as_json=values["as_json"])


@link_test.command(cls=JsonCommand, epilog=_EPILOG)
@click.argument("endpoint", metavar="HOST:PORT")
@test_options
@click.pass_context
def connect(ctx: click.Context, /, endpoint: str, **values: Any) -> None:  # noqa: ANN401
    """Test the link to `kvrdma link-test serve` at HOST:PORT."""

    def work() -> KVRDMAError | None:
        config = Config.from_env()
        test = read_options(values, config, _typed(ctx))
        if test.options.device.kind == "cpu":
            check_room(test.cases, peer_here=False)
        with SideChannelClient(Endpoint.parse(endpoint), config.secret) as client:
            try:
                client.request(CloseLink(0), config.control_timeout_s)  # is anybody there, and one of ours?
            except UnreachableError as error:
                error.add_note("is `kvrdma link-test serve` running there?")
                raise
            candidates = open_candidates(test.transport, test.options, test.listed)
            established = EstablishedControl(client)

            def end(link: Link) -> None:
                """Let the peer drop its end of the link, as a process that ends would."""
                with SideChannelClient(Endpoint.parse(endpoint), config.secret) as other:
                    other.request(CloseLink(link.number), config.control_timeout_s)

            return _test(candidates.beyond_process(), established, test, Peers(lambda: EstablishedControl(client), end))

    run("link-test", work, as_json=values["as_json"])


@link_test.command(epilog=_SERVE_EPILOG)
@click.option("--bind", default="127.0.0.1:7471", show_default=True, metavar="HOST:PORT", help="Where.")
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda:N", help="Memory to be read.")
@click.option("--insecure", is_flag=True, help="Listen beyond loopback without KVRDMA_SECRET.")
def serve(bind: str, device: str, *, insecure: bool) -> None:
    """Be the peer of `kvrdma link-test connect`, until interrupted."""
    stops = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # before any thread: none of them takes the signal
    try:
        run("link-test", lambda: _serve(bind, device, stops, insecure=insecure), as_json=False)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(bind: str, device: str, stops: set[signal.Signals], *, insecure: bool) -> None:
    config, memory = Config.from_env(), Device.parse(device)
    peer = LinkPeer(memory)
    server = SideChannelServer(Endpoint.parse(bind), peer.handle, config.secret, insecure=insecure)
    how = "encrypted, KVRDMA_SECRET needed" if config.secret else "no secret, not encrypted"
    names = ", ".join(reaching_further(memory.kind)) or "none, see `kvrdma doctor`"
    click.echo(f"listening at {server.endpoint} ({how}); transports that open here: {names}")
    with ExitStack() as stack:
        stack.callback(peer.close)
        stack.callback(server.close)
        serve_until(stops, server, "link test's server")


def _test_here(test: Test) -> KVRDMAError | None:
    if test.options.device.kind == "cpu":
        check_room(test.cases, peer_here=True)
    candidates = open_candidates(test.transport, test.options, test.listed)
    with ExitStack() as stack:
        stack.callback(candidates.close)
        if candidates.need_this_process:
            control: Control = LocalControl(LinkPeer(test.options.device))
            stack.callback(control.close)
            return _test(candidates, control, test, Peers(lambda: control, None))
        candidates = candidates.beyond_process()
        spawned = [SpawnedPeer(test.options.device, PEER_DEADLINE_S)]

        def now() -> Control:
            """Give the peer, a new one if it was killed."""
            if spawned[-1].process.poll() is not None:
                spawned[-1].close()
                spawned.append(SpawnedPeer(test.options.device, PEER_DEADLINE_S))
            return spawned[-1]

        @stack.callback
        def end() -> None:
            spawned[-1].close()

        def kill(_: Link) -> None:
            spawned[-1].process.kill()

        return _test(candidates, spawned[-1], test, Peers(now, kill))


def _test(candidates: Candidates, control: Control, test: Test, peers: Peers) -> KVRDMAError | None:
    opened = connect_first(candidates, control, with_room(test.cases, test.more), test.options)
    try:
        with progress_of(test.cases, as_json=test.as_json) as progress:
            result = measure(opened, test.cases, progress)
        found = measure_more(test.more, opened, test.cases[0], peers, test.options)
    finally:
        opened.link.close()
    report, wrong = finish(result.report, found)
    wrong = _show(replace(result, report=report), test) or wrong
    return wrong or save_json("--save", test.more.save, {"kind": "link", **report.to_builtins()})


def _show(result: LinkResult, test: Test) -> DataError | None:
    """Print the report; gives what is wrong with the bytes."""
    for error in result.refused:
        click.echo(f"not used: {error}", err=True)
    if test.as_json:
        click.echo(json.dumps(result.report.to_builtins()))
    else:
        print_result(result, test.request)
        print_more(result.report)
    if not result.mismatches:
        return None
    return DataError("\n".join(["bytes arrived that are not the peer's:", *result.mismatches]))
