"""The `kvrdma` command: diagnosis, link tests, benchmarks and read plans from a terminal."""

from __future__ import annotations

import importlib
from typing import Any

import click

from kvrdma import __version__
from kvrdma.cli.exits import whole_process

_COMMANDS = {
    "report": ("kvrdma.cli.report", "report"),
    "completion": ("kvrdma.cli.completion", "completion"),
    "bench": ("kvrdma.cli.bench", "bench"),
    "doctor": ("kvrdma.cli.doctor", "doctor"),
    "link-test": ("kvrdma.cli.link_test", "link_test"),
    "plan": ("kvrdma.cli.plan", "plan_command"),
    "store": ("kvrdma.cli.store", "store"),
}


class _LazyGroup(click.Group):
    """A group that imports a command's module only when that command is used."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:  # noqa: ANN401 - as click declares it
        with whole_process():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401
        with whole_process():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, name = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


_EPILOG = """\b
Examples:
  kvrdma doctor                                    what is wrong with this host
  kvrdma link-test                                 what the best transport of this host can do
  kvrdma link-test serve --bind 0.0.0.0:7471       on one host, and on another:
  kvrdma link-test connect HOST:7471 --save a.json
  kvrdma report a.json                             a page with plots and a verdict
  kvrdma plan --p-tp 4 --d-tp 2                    who reads what from whom
  kvrdma bench --simulate                          a model of a thousand engines

\b
docs/troubleshooting.md has every error with its cause and cure.
"""


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvrdma")
def main() -> None:
    """Move the KV cache of large language models between engines, and find out what the link can do."""
