"""Help, completion and the page of errors: complete, and in step with the code."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from kvrdma import errors
from kvrdma.bench.cluster.scenario import Scenario, Shape, make_scenario
from kvrdma.cli import main
from kvrdma.cli.exits import EXIT_CODES, INTERRUPTED, NOBODY_READS, OUTPUT_LOST
from kvrdma.config import VARIABLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()


def commands(group: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, group
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from commands(command, *path, name)


COMMANDS = dict(commands(main))


def test_all_commands_are_there() -> None:
    assert {path[0] for path in COMMANDS if path} >= {"bench", "completion", "doctor", "link-test", "plan", "report"}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_is_complete_and_has_examples(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main, [*path, "--help"])
    assert shown.exit_code == 0
    assert "Example" in shown.output, f"no example in `kvrdma {' '.join(path)} --help`"
    command = COMMANDS[path]
    assert command.help or command.callback.__doc__
    for option in command.params:
        if isinstance(option, click.Option) and option.name not in ("help", "version"):
            assert option.help, f"{option.opts} of {path} has no help"


@pytest.mark.parametrize("name", ["bench", "doctor", "link-test", "plan", "report"])
def test_help_has_the_exit_codes(name: str) -> None:
    shown = CliRunner().invoke(main, [name, "--help"]).output
    codes = [int(code) for code in re.findall(r"^ +(\d+) +\S", shown.partition("Exit codes:")[2], re.MULTILINE)]
    assert codes[0] == 0
    assert codes == sorted(codes)
    assert set(codes) >= {OUTPUT_LOST, INTERRUPTED, NOBODY_READS}
    assert set(codes) <= {0, OUTPUT_LOST, INTERRUPTED, NOBODY_READS, *(code for _, code in EXIT_CODES)}


def test_help_of_bench_is_a_scenario_of_every_key_and_its_default() -> None:
    shown = CliRunner().invoke(main, ["bench", "--help"]).output
    text = shown.partition("A scenario, with every key")[2].partition("Exit codes:")[0].partition("\n")[2]
    values = tomllib.loads(text)
    everything = json.loads(msgspec.json.encode(Scenario()))
    assert values | {"consumer": values["producer"]} == everything
    table = tomllib.loads(text.replace("# model = {", "[own]\nmodel = {"))["own"]["model"]
    assert set(table) == set(Shape.__struct_fields__)
    own = make_scenario({"model": table}, "of the help")
    named = make_scenario({"model": values["model"]}, "of the help")
    assert own.kv == named.kv


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    shown = CliRunner().invoke(main, ["completion", shell])
    assert shown.exit_code == 0
    assert f"_KVRDMA_COMPLETE={shell}_complete" in shown.output


def test_completion_knows_commands_and_options() -> None:
    def complete(words: str, number: int) -> str:
        env = {**os.environ, "_KVRDMA_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        script = "from kvrdma.cli import main; main(prog_name='kvrdma')"
        return subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
        ).stdout

    assert "plain,doctor" in complete("kvrdma do", 1)
    assert "plain,--require-rdma" in complete("kvrdma link-test --req", 2)


CLASSES = [
    name
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.KVRDMAError) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_has_its_cause_and_cure(name: str) -> None:
    if name == "KVRDMAError":
        assert "`KVRDMAError`" in PAGE
        return
    rows = re.findall(rf"^\| `{name}` \|(.+)\|$", PAGE, re.MULTILINE)
    assert len(rows) == 1, f"{name} needs one row"
    cells = [cell.strip() for cell in rows[0].split("|")]
    assert len(cells) == 3
    assert all(cells[1:]), f"{name}: cause and cure"


def test_the_page_names_no_error_that_does_not_exist() -> None:
    rows = re.findall(r"^\| `(\w+Error)` \|", PAGE, re.MULTILINE)
    assert set(rows) == set(CLASSES) - {"KVRDMAError"}
    of_transports = {"KVRDMA_UCX_LIB", "KVRDMA_VERBS_DEVICES", "KVRDMA_VERBS_GID_INDEX"}
    assert set(re.findall(r"KVRDMA_[A-Z_]+", PAGE)) <= {*VARIABLES, *of_transports}


@pytest.mark.parametrize(
    "text",
    [
        "Endpoint timeout",
        "transports … are not available",
        "hash mismatch",
        "ibv_create_ah failed",
        "process_vm_readv: Operation not permitted",
    ],
)
def test_well_known_messages_are_on_the_page(text: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{text}` |")]
    assert len([cell for cell in row.split("|") if cell.strip()]) == 4
