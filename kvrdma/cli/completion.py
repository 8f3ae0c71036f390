"""`kvrdma completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_EPILOG = """\b
Examples:
  kvrdma completion bash > ~/.local/share/bash-completion/completions/kvrdma
  kvrdma completion zsh > "${fpath[1]}/_kvrdma"
  kvrdma completion fish > ~/.config/fish/completions/kvrdma.fish
  eval "$(kvrdma completion bash)"                          for this shell only
"""


@click.command(epilog=_EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell."""
    from kvrdma.cli import main

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "kvrdma", "_KVRDMA_COMPLETE").source())
