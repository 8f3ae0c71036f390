"""The `kvrdma` command: diagnosis, link tests, benchmarks and read plans from a terminal."""

from __future__ import annotations

import importlib

import click

from kvrdma import __version__

_COMMANDS = {
    "report": ("kvrdma.cli.report", "report"),
    "bench": ("kvrdma.cli.bench", "bench"),
    "doctor": ("kvrdma.cli.doctor", "doctor"),
    "link-test": ("kvrdma.cli.link_test", "link_test"),
    "plan": ("kvrdma.cli.plan", "plan_command"),
    "store": ("kvrdma.cli.store", "store"),
}


class _LazyGroup(click.Group):
    """A group that imports a command's module only when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, name = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvrdma")
def main() -> None:
    """Move the KV cache of large language models between engines, and find out what the link can do."""
