"""`kvrdma link-test` follows the settings of the environment, unless an option says otherwise."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from kvrdma.bench import choose
from kvrdma.bench.choose import open_candidates
from kvrdma.bench.link import LinkOptions
from kvrdma.cli import link_test
from kvrdma.cli.link_options import read_options
from kvrdma.config import Config
from kvrdma.errors import ConfigError, TransportUnavailableError
from kvrdma.transport import Transport, open_transport
from tests.helpers.link_cli import SMALL, failure, run, values


def test_settings_are_the_defaults_of_the_options() -> None:
    config = Config(transports=("memory", "cma"), require_one_sided=True)
    test = read_options(values(), config)
    assert (test.transport, test.listed, test.options.require_one_sided) == ("auto", ("memory", "cma"), True)
    typed = read_options(values(transport="cma"), config, {"transport"})
    assert (typed.transport, typed.listed) == ("cma", ())
    assert read_options(values(require_rdma=True), Config()).options.require_one_sided


def test_the_first_of_the_list_that_works_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def opening(name: str, **options: object) -> Transport:
        if name == "ucx":
            raise TransportUnavailableError("ucx: no library")
        return open_transport(name, **options)

    monkeypatch.setattr(choose, "open_transport", opening)
    found = open_candidates("auto", LinkOptions(), ("ucx", "memory", "cma"))
    try:
        assert [each.name for each in found.transports] == ["memory", "cma"], "not the nearest: the first"
        assert [str(error) for error in found.refused] == ["ucx: no library"]
    finally:
        found.close()
    assert [each.name for each in open_candidates("memory", LinkOptions(), ("cma",)).transports] == ["memory"]


@pytest.mark.parametrize("arguments", [(), ("connect", "127.0.0.1:1")], ids=["here", "connect"])
def test_an_unknown_transport_is_a_mistake_of_the_settings(arguments: tuple[str, ...]) -> None:
    ended = run(*arguments, *SMALL, "--json", environ={"KVRDMA_TRANSPORTS": "cma,infiniband"})
    assert ended.returncode == 2
    found = failure(ended.stdout)
    assert found["error"] == "ConfigError"
    assert "KVRDMA_TRANSPORTS: transport 'infiniband' is not installed; installed: cma, memory, ucx" in found["message"]
    with pytest.raises(ConfigError, match="'infiniband' is not installed"):
        read_options(values(), Config(transports=("infiniband",)))


@pytest.mark.parametrize(
    ("environ", "options", "transport"),
    [
        ({"KVRDMA_TRANSPORTS": "memory"}, (), "memory"),
        ({"KVRDMA_TRANSPORTS": "nosuch"}, ("--transport", "memory"), "memory"),
    ],
)
def test_the_command_uses_them(environ: Mapping[str, str], options: tuple[str, ...], transport: str) -> None:
    ended = run(*options, *SMALL, "--json", environ=environ)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["transport"] == transport


def test_serve_lists_what_opens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def opening(name: str, **_: object) -> Transport:
        if name == "cma":
            return open_transport("cma")
        if name == "memory":
            return open_transport("memory")
        raise TransportUnavailableError(f"{name}: not here")

    def end(*_: object) -> Any:  # noqa: ANN401
        raise ConfigError("ended")

    monkeypatch.setattr(choose, "open_transport", opening)
    monkeypatch.setattr(signal, "sigtimedwait", end)
    with pytest.raises(ConfigError, match="ended"):
        link_test._serve("127.0.0.1:0", "cpu", set(), insecure=False)
    assert capsys.readouterr().out.rstrip().endswith("; transports that open here: cma")
    monkeypatch.setattr(choose, "installed_transports", dict)
    with pytest.raises(ConfigError, match="ended"):
        link_test._serve("127.0.0.1:0", "cpu", set(), insecure=False)
    assert capsys.readouterr().out.rstrip().endswith("; transports that open here: none, see `kvrdma doctor`")
