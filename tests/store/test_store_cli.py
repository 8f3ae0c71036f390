"""`kvrdma store serve` and `stats`, as people run them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from kvrdma.cli import main
from kvrdma.sidechannel import SideChannelServer
from kvrdma.store.filling import Filler
from tests.helpers.stores import Client

pytestmark = pytest.mark.needs("cma")

KVRDMA = [sys.executable, "-m", "kvrdma"]
BLOCKS = [3, 1, 4, 0]


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    command = [*KVRDMA, "store", "serve", "--bind", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"at (\S+:\d+) \(", line)
        assert match, (line, process.poll())
        yield process, match[1], line
    finally:
        process.kill()
        process.communicate()


def test_serve_stats_metrics_and_a_clean_end() -> None:
    with serving("--capacity", "4MiB", "--metrics", "127.0.0.1:0") as (process, endpoint, line):
        assert line.startswith("store of 4.0 MiB at ")
        with Client([endpoint]) as client:
            assert client.put(1, 16, BLOCKS)
            assert client.get(1, 16, BLOCKS) == 16
            assert client.get(2, 16, BLOCKS) == 0
            ended = subprocess.run(
                [*KVRDMA, "store", "stats", endpoint, "--json"], capture_output=True, text=True, timeout=60, check=True
            )
            numbers = json.loads(ended.stdout)
            assert (numbers["filled"], numbers["hits"], numbers["looked_up"]) == (4, 4, 8)
            shown = subprocess.run(
                [*KVRDMA, "store", "stats", endpoint], capture_output=True, text=True, timeout=60, check=True
            ).stdout
            assert re.search(r"^hit rate +50.0 %$", shown, re.MULTILINE), shown
            assert re.search(r"^capacity_bytes +4.0 MiB$", shown, re.MULTILINE), shown
            page = re.search(r"http://\S+/metrics", line)
            assert page
            with urllib.request.urlopen(page[0], timeout=10) as answer:
                assert b"kvrdma_store_filled_total 4.0" in answer.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["serve", "--capacity", "900TiB"], 2, "of memory that are free here"),
        (["serve", "--capacity", "1KiB"], 2, "needs 65536 bytes"),
        (["serve", "--bind", "nonsense"], 2, "HOST:PORT"),
        (["serve", "--bind", "0.0.0.0:0", "--insecure", "--capacity", "1MiB"], 2, "--advertise"),
        (["serve", "--bind", "0.0.0.0:0", "--advertise", "127.0.0.1", "--capacity", "1MiB"], 2, "KVRDMA_SECRET"),
        (["serve", "--bind", "127.0.0.1:0", "--capacity", "1MiB", "--metrics", "203.0.113.1:1"], 2, "cannot be served"),
        (["stats", "127.0.0.1:1"], 3, "nobody listens at 127.0.0.1:1"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(arguments: list[str], code: int, says: str) -> None:
    command = [*KVRDMA, "store", *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"KVRDMA_CONTROL_TIMEOUT_S": "1"}
    )
    assert ended.returncode == code, ended
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("part", "method"), [(Filler, "_step"), (SideChannelServer, "_answer_until_stopped")])
def test_a_store_that_dies_of_a_defect_is_no_wrong_option(
    part: type, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def die(_: object) -> None:
        raise RuntimeError("a defect of this test")

    monkeypatch.setattr(part, method, die)
    ended = CliRunner().invoke(main, ["store", "serve", "--capacity", "1MiB", "--bind", "127.0.0.1:0"])
    assert ended.exit_code == 1
    assert isinstance(ended.exception, SystemExit), "the defect itself came out"
    assert "store serve: the store was ended by a defect: see the log" in ended.stderr
    assert "a defect of this test" in caplog.text


def test_stats_of_something_else_than_a_store() -> None:
    from tests.helpers.tagged import Model, Side

    with Side(Model()) as side:
        endpoint = str(side.ranks[0].engine.endpoint)
        ended = subprocess.run(
            [*KVRDMA, "store", "stats", endpoint, "--json"], capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 1
        assert json.loads(ended.stdout)["error"] == "MessageError"
