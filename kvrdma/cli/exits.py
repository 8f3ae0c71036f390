"""How a command ends badly: a message on stderr, an exit code, and with ``--json`` one object on stdout."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from kvrdma import __version__, errors
from kvrdma.cli.streams import open_streams
from kvrdma.errors import ConfigError, KVRDMAError

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

INTERRUPTED = 130
OUTPUT_LOST, NOBODY_READS = 74, 141
"""The output could not be written (as sysexits.h has it); its reader has gone (as a shell reports SIGPIPE)."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def exit_code(error: KVRDMAError) -> int:
    """Give the exit code of an error."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def text_of(error: KVRDMAError) -> str:
    """Give an error's message and the notes that were added to it."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@contextmanager
def whole_process() -> Iterator[None]:
    """Enclose a command: what happens to stdout, and Ctrl-C at any point, become an exit code."""
    open_streams()
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up_stdout()
        sys.exit(NOBODY_READS)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        _give_up_stdout()
        click.echo(f"kvrdma: the output cannot be written: {error.strerror}", err=True)
        sys.exit(OUTPUT_LOST)


def _give_up_stdout() -> None:
    """Let what is still buffered go nowhere, or the interpreter complains of it at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_place(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold.

    Raises:
        ConfigError: there is no such folder, or no right to write there.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: no right to write there")


def save_json(option: str, path: Path | None, report: Mapping[str, Any]) -> ConfigError | None:
    """Write a report, where that was asked for; gives what went wrong: the report has been printed by then."""
    if path is None:
        return None
    try:
        path.write_text(json.dumps(report) + "\n")
    except OSError as error:
        return ConfigError(f"{option} {path}: the report cannot be saved: {error}")
    return None


def run(command: str, work: Callable[[], KVRDMAError | None], *, as_json: bool, code: int | None = None) -> None:
    """Do the work of a command; turn errors into a message and an exit code.

    Args:
        command: name in front of the message.
        work: returns the error of a test, or of saving it, that failed after its own JSON object was printed.
        as_json: whether an error that is raised is printed as JSON too.
        code: exit code of every error, where it does not depend on the class.
    """
    try:
        error = work()
    except KVRDMAError as raised:
        _leave(command, type(raised).__name__, text_of(raised), code or exit_code(raised), as_json=as_json)
    except MemoryError as raised:
        text = f"out of memory ({raised}): give smaller sizes"
        _leave(command, "MemoryError", text, 2, as_json=as_json)
    except KeyboardInterrupt:
        _leave(command, "KeyboardInterrupt", "interrupted", INTERRUPTED, as_json=as_json)
    else:
        if error is not None:
            _leave(command, "", text_of(error), code or exit_code(error), as_json=False)


def _leave(command: str, kind: str, text: str, code: int, *, as_json: bool) -> None:
    click.echo(f"{command}: {text}", err=True)
    if as_json:
        _print_json(kind, code, text)
    sys.exit(code)


def _print_json(kind: str, code: int, text: str) -> None:
    failure = {"kvrdma": __version__, "verified": False, "error": kind, "code": code, "message": text}
    click.echo(json.dumps(failure))


@contextmanager
def _usage_errors(*, as_json: bool) -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if as_json:
            _print_json(type(error).__name__, error.exit_code, error.format_message())
        raise


class JsonCommand(click.Command):
    """A command with ``--json`` that prints an object for wrong usage, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does."""
        with _usage_errors(as_json="--json" in args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - as click declares it
        """Run as click does."""
        with _usage_errors(as_json=bool(ctx.params.get("as_json"))):
            return super().invoke(ctx)


class JsonGroup(JsonCommand, click.Group):
    """The same for a group."""
