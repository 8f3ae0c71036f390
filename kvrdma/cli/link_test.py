"""`kvrdma link-test`: what can the link between two processes do, and does every byte arrive?"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import click

from kvrdma import errors
from kvrdma.bench.choose import Candidates, connect_first, open_candidates
from kvrdma.bench.link import LinkResult, measure
from kvrdma.bench.link_peer import LinkPeer
from kvrdma.bench.spawned_peer import Control, LocalControl, SpawnedPeer
from kvrdma.cli.link_options import Test, read_options, test_options
from kvrdma.cli.link_report import print_result, progress_of
from kvrdma.config import Config
from kvrdma.errors import DataError, KVRDMAError
from kvrdma.sidechannel import Endpoint, SideChannelClient, SideChannelServer
from kvrdma.transport import Device, installed_transports
from kvrdma.wire import CloseLink

PEER_DEADLINE_S = 3600.0
EXIT_CODES: tuple[tuple[type[KVRDMAError], int], ...] = (
    (errors.ConfigError, 2),
    (errors.TopologyError, 2),
    (errors.UnreachableError, 3),
    (errors.AuthenticationError, 4),
    (errors.ProtocolVersionError, 5),
    (errors.DataError, 6),
    (errors.TransportUnavailableError, 7),
    (errors.NotOneSidedError, 8),
    (errors.TransportError, 9),
    (errors.KVRDMAError, 1),
)
"""Exit code of an error: that of the first class it belongs to."""

_EPILOG = """\b
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
  130  interrupted
"""


def exit_code(error: KVRDMAError) -> int:
    """Give the exit code of an error."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def _run(work: Callable[[], None]) -> None:
    """Do the work; turn errors into a message and an exit code."""
    try:
        work()
    except KVRDMAError as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        click.echo(f"link-test: {error}{notes}", err=True)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        click.echo("link-test: interrupted", err=True)
        sys.exit(130)


@click.group("link-test", invoke_without_command=True, epilog=_EPILOG)
@test_options
@click.pass_context
def link_test(ctx: click.Context, /, **values: Any) -> None:  # noqa: ANN401 - click passes every option by name
    """Read scattered blocks from a peer's memory, verify every byte, and say how fast it is.

    Without a subcommand the peer is a new process on this host.
    """
    if ctx.invoked_subcommand is not None:
        typed = click.core.ParameterSource.COMMANDLINE
        if any(ctx.get_parameter_source(name) == typed for name in values):
            raise click.UsageError(f"options belong after {ctx.invoked_subcommand!r}, not before it")
        return
    _run(lambda: _test_here(read_options(values, Config.from_env())))


@link_test.command(epilog=_EPILOG)
@click.argument("endpoint", metavar="HOST:PORT")
@test_options
def connect(endpoint: str, **values: Any) -> None:  # noqa: ANN401
    """Test the link to `kvrdma link-test serve` at HOST:PORT."""

    def work() -> None:
        config = Config.from_env()
        test = read_options(values, config)
        with SideChannelClient(Endpoint.parse(endpoint), config.secret) as client:
            client.request(CloseLink(0), config.control_timeout_s)  # is anybody there, and one of ours?
            candidates = open_candidates(test.transport, test.options)
            _test(candidates.beyond_process(), client, test)

    _run(work)


@link_test.command(epilog=_EPILOG)
@click.option("--bind", default="127.0.0.1:7471", show_default=True, metavar="HOST:PORT", help="Where.")
@click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda:N", help="Memory to be read.")
@click.option("--insecure", is_flag=True, help="Listen beyond loopback without KVRDMA_SECRET.")
def serve(bind: str, device: str, *, insecure: bool) -> None:
    """Be the peer of `kvrdma link-test connect`, until interrupted."""
    stops = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # before any thread: none of them takes the signal
    try:
        _run(lambda: _serve(Endpoint.parse(bind), LinkPeer(Device.parse(device)), stops, insecure=insecure))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(bind: Endpoint, peer: LinkPeer, stops: set[signal.Signals], *, insecure: bool) -> None:
    config = Config.from_env()
    server = SideChannelServer(bind, peer.handle, config.secret, insecure=insecure)
    how = "encrypted, KVRDMA_SECRET needed" if config.secret else "no secret, not encrypted"
    names = ", ".join(sorted(installed_transports()))
    click.echo(f"listening at {server.endpoint} ({how}); transports: {names}")
    try:
        while signal.sigtimedwait(stops, 1.0) is None and server.alive:
            pass
    finally:
        server.close()
        peer.close()


def _test_here(test: Test) -> None:
    candidates = open_candidates(test.transport, test.options)
    control: Control
    with ExitStack() as stack:
        stack.callback(candidates.close)
        if candidates.need_this_process:
            control = LocalControl(LinkPeer(test.options.device))
        else:
            candidates = candidates.beyond_process()
            control = SpawnedPeer(test.options.device, PEER_DEADLINE_S)
        stack.callback(control.close)
        _test(candidates, control, test)


def _test(candidates: Candidates, control: Control, test: Test) -> None:
    opened = connect_first(candidates, control, test.cases, test.options)
    try:
        with progress_of(test.cases, as_json=test.as_json) as progress:
            result = measure(opened, test.cases, progress)
    finally:
        opened.link.close()
    _show(result, test)


def _show(result: LinkResult, test: Test) -> None:
    for error in result.refused:
        click.echo(f"not used: {error}", err=True)
    if test.as_json:
        click.echo(json.dumps(result.report.to_builtins()))
    else:
        print_result(result, test.request)
    if result.mismatches:
        raise DataError("\n".join(["bytes arrived that are not the peer's:", *result.mismatches]))
