"""`kvrdma link-test serve` ends when it is told to, and only then."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest
from click.testing import CliRunner

from kvrdma import wire
from kvrdma.cli import link_test, main
from kvrdma.sidechannel import Endpoint, SideChannelClient, SideChannelServer
from tests.helpers.link_cli import command


def test_a_process_that_was_stopped_and_continued_serves_on() -> None:
    with subprocess.Popen(command("serve", "--bind", "127.0.0.1:0"), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            endpoint = Endpoint.parse(process.stdout.readline().removeprefix("listening at ").partition(" ")[0])
            time.sleep(0.2)  # it waits by now, for a second
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.5)  # longer than it waits
            process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
            with SideChannelClient(endpoint) as client:
                assert client.request(wire.CloseLink(0), 30) == wire.LinkClosed()
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def test_only_a_signal_to_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = {signal.SIGTERM, signal.SIGINT}
    answers = [None, signal.struct_siginfo((0,) * 7), signal.struct_siginfo((signal.SIGTERM, *(0,) * 6))]
    asked: list[object] = []

    def answer(signals: object, timeout_s: float) -> signal.struct_siginfo | None:
        asked.append(signals)
        assert timeout_s > 0
        return answers[len(asked) - 1]

    monkeypatch.setattr(signal, "sigtimedwait", answer)
    link_test._serve("127.0.0.1:0", "cpu", stops, insecure=False)
    assert asked == [stops] * 3


def test_a_server_that_dies_of_a_defect_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def die(_: object) -> None:
        raise RuntimeError("a defect of this test")

    monkeypatch.setattr(SideChannelServer, "_answer_until_stopped", die)
    ended = CliRunner().invoke(main, ["link-test", "serve", "--bind", "127.0.0.1:0"])
    assert ended.exit_code == 1
    assert isinstance(ended.exception, SystemExit), "the defect itself came out"
    assert "the link test's server was ended by a defect: see the log" in ended.stderr
    assert "a defect of this test" in caplog.text
