"""What an operator's shell does to a command: full disks, readers that leave, Ctrl-C, places that cannot be written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvrdma.bench.cluster.scenario import make_scenario
from kvrdma.bench.cluster.simulate import Links, simulate
from kvrdma.cli import main
from kvrdma.errors import ConfigError

KVRDMA = [sys.executable, "-m", "kvrdma"]
SMALL = ["link-test", "--transport", "memory", "--nbytes", "64K", "--block", "4K", "--iters", "1"]
COMMANDS = [["--help"], [*SMALL], [*SMALL, "--json"], ["plan"], ["plan", "--json"], ["completion", "bash"],
            ["bench", "--simulate", "--engines", "2", "--set", "prompt.tokens=64"]]  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_output_onto_a_full_disk(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([*KVRDMA, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 74
    assert ended.stderr.endswith("kvrdma: the output cannot be written: No space left on device\n")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_reader_that_has_gone_is_told_by_the_exit_code_alone(words: list[str]) -> None:
    process = subprocess.Popen([*KVRDMA, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait() == 141, said
    assert "Traceback" not in said
    assert "Broken" not in said
    process.stderr.close()


@pytest.mark.parametrize("words", [SMALL, ["bench", "--simulate", "--engines", "2", "--set", "prompt.tokens=64"]])
def test_without_any_stdout(words: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "a.json"
    line = ["sh", "-c", '"$0" "$@" >&-', *KVRDMA, *words, "--save", str(saved)]
    ended = subprocess.run(line, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(saved.read_text())["kvrdma"]


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", "2>&3"])
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([*SMALL, "--json"], 0, '"verified": true'),
        ([*SMALL, "--soak", "200ms", "--json"], 0, '"soak"'),
        ([*SMALL, "--save", "/dev/full"], 2, "verified"),
        (["store", "stats", "127.0.0.1:1", "--json"], 3, '"code": 3'),
        (["doctor", "--metrics", "file:///", "--quiet"], 1, "is no http URL"),
        (["report", "/no/such"], 2, ""),
        (["plan", "--p-tp", "x"], 2, ""),
        (["nonsense"], 2, ""),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_messages_that_cannot_be_written_change_nothing(where: str, words: list[str], code: int, says: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # 3 is a pipe that nobody reads
    line = ["bash", "-c", f'exec 3>&{writer}; "$0" "$@" {where} 3>&-', *KVRDMA, *words]
    ended = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False, pass_fds=(writer,))
    os.close(writer)
    assert ended.returncode == code
    assert says in ended.stdout


def test_messages_are_written_where_they_can_be() -> None:
    ended = subprocess.run([*KVRDMA, "report", "/no/\udcff\u20ac"], capture_output=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"report: /no/\\udcff\xe2\x82\xac cannot be read as a saved report")


def test_ctrl_c_before_a_command_has_begun() -> None:
    script = (
        "import signal, kvrdma.cli as cli\n"
        "cli._LazyGroup.get_command = lambda *_: signal.raise_signal(signal.SIGINT)\n"
        "cli.main(['doctor'])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGINT, "interrupted\n")


@pytest.mark.parametrize("words", [SMALL, ["bench", "--simulate", "--engines", "2"]], ids=["link-test", "bench"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(words: list[str], tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, [*words, "--save", str(tmp_path / "no/a.json")])
    assert shown.exit_code == 2
    assert f"there is no folder {tmp_path / 'no'}" in shown.stderr
    assert not shown.stdout, "nothing was measured for nothing"


@pytest.mark.parametrize("words", [SMALL, ["bench", "--simulate", "--engines", "2"]], ids=["link-test", "bench"])
def test_what_was_measured_is_printed_although_it_cannot_be_saved(words: list[str]) -> None:
    shown = CliRunner().invoke(main, [*words, "--json", "--save", "/dev/full"])
    assert shown.exit_code == 2
    assert "--save /dev/full: the report cannot be saved: [Errno 28] No space left on device" in shown.stderr
    (line,) = shown.stdout.splitlines()
    assert "error" not in json.loads(line)


def test_a_soak_of_no_time_is_refused() -> None:
    shown = CliRunner().invoke(main, [*SMALL, "--soak", "0s"])
    assert shown.exit_code == 2
    assert "'0s' is not a time such as 30s" in shown.output


def _options_of_numbers(command: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    """Every option that takes a number with a fraction, with the words that lead to it."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), name)
            assert inner is not None
            yield from _options_of_numbers(inner, *path, name)
    for option in command.params:
        if isinstance(option.type, click.types.FloatParamType) or option.type.name == "duration":
            yield (*path, option.opts[0])


def test_no_option_takes_a_number_that_is_none() -> None:
    found = list(_options_of_numbers(main))
    assert {("bench", "--row-ns"), ("report", "--link-gbit"), ("link-test", "--soak")} < set(found)
    for *path, option in found:
        rest = ["a.json"] if path == ["report"] else ["h:1"] if "connect" in path else []
        for value in ("nan", "inf", "-inf", "1e308", "-1", "x"):
            shown = CliRunner().invoke(main, [*path, option, value, *rest])
            assert (shown.exit_code, shown.stdout.count("Traceback")) == (2, 0)
            assert f"Invalid value for '{option}'" in shown.stderr, (path, option, value)


def test_a_soak_of_all_eternity_is_refused() -> None:
    shown = CliRunner().invoke(main, [*SMALL, "--soak", f"{'9' * 400}s"])
    assert shown.exit_code == 2
    assert "is more than 10000h" in shown.output


def test_a_request_too_long_to_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a request of 1000000000 tokens has 2000000000 pages"):
        simulate(make_scenario({"prompt": {"tokens": 10**9}}, ""), 2, Links(1e-6, 1e9, 1e-7))


def test_requests_that_never_arrive_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"arrival.rate 1e-320: Expected `float` >= 1e-06"):
        make_scenario({"arrival": {"kind": "poisson", "rate": 1e-320}}, "")
