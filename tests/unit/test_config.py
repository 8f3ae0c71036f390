"""Settings from the environment."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrdma.config import VARIABLES, Config, unknown_settings
from kvrdma.errors import ConfigError, UnreachableError
from kvrdma.sidechannel import Endpoint

README = Path(__file__).parents[2] / "README.md"


def test_unset_and_empty_keep_the_default() -> None:
    assert Config.from_env({}) == Config() == Config.from_env({"KVRDMA_LEASE_S": ""})


def test_a_misspelt_setting_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"KVRDMA_LEASE": "5", "KVRDMA_UCX_LIB": "x", "UCX_TLS": "tcp", "KVRDMA_BIND": "[::1]:0"}
    with caplog.at_level(logging.WARNING, "kvrdma.config"):
        assert Config.from_env(environ).bind == "[::1]:0"
        Config.from_env(environ)
    assert [record.message for record in caplog.records] == [
        "KVRDMA_LEASE is no setting of kvrdma: did you mean KVRDMA_LEASE_S?"
    ]
    assert unknown_settings(environ) == ["KVRDMA_LEASE"]


@pytest.mark.parametrize("name", VARIABLES)
def test_every_setting_is_in_the_readme(name: str) -> None:
    assert f"`{name}`" in README.read_text()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"secret": "short"}, "secret: has 5 characters"),
    ({"secret": b"x" * 32}, "secret: is a bytes"),
    ({"transports": "cma"}, "transports: 'cma' is not a tuple"),
    ({"transports": ("cma", "cma")}, "transports: cma, cma names one of them twice"),
    ({"allow_peers": "10.0.0.11"}, "allow_peers: '10.0.0.11' is not a tuple"),  # '10.0.0.1' is in that text
    ({"allow_peers": ("10.0.0.0/33",)}, "allow_peers: '10.0.0.0/33'"),
    ({"allow_peers": ("10.0.0.1:7000",)}, "allow_peers: '10.0.0.1:7000'"),
    ({"advertise": "10.0.0.1:7000"}, "advertise: '10.0.0.1:7000'"),
    ({"advertise": " "}, "advertise: ' ' is not a host"),
    ({"bind": 7000}, "bind: 7000 is not a text"),
    ({"bind": "garbage"}, "bind: 'garbage' is not HOST:PORT with a port up to 65535"),
    ({"bind": ""}, "bind: '' is not HOST:PORT"),
    ({"bind": "127.0.0.1:65536"}, "bind: '127.0.0.1:65536' is not HOST:PORT"),
    ({"bind": "::1:0"}, "bind: '::1:0' is not HOST:PORT"),
    ({"bind": "[host]:0"}, "bind: '[host]:0' is not HOST:PORT"),
    ({"bind": "tcp://host:0"}, "bind: 'tcp://host:0' is not HOST:PORT"),
    ({"bind": " :0"}, "bind: ' :0' is not HOST:PORT"),
    ({"lease_s": -1}, "lease_s: -1 is not a number of seconds between 0 and 86400"),
    ({"lease_s": 1e9}, "lease_s: 1000000000.0"),  # consumers would refuse the references
    ({"pull_timeout_s": float("nan")}, "pull_timeout_s: nan"),
    ({"control_timeout_s": "3"}, "control_timeout_s: '3'"),
    ({"peer_idle_s": True}, "peer_idle_s: True"),
    ({"fence_slots": 0}, "fence_slots: 0 is not a whole number between 1 and 1048576"),
    ({"breaker_threshold": 1.5}, "breaker_threshold: 1.5"),
    ({"insecure": "0"}, "insecure: '0' is not true or false"),  # which is true
    ({"require_one_sided": 1}, "require_one_sided: 1"),
    ({"verify": "digests"}, "verify: 'digests' is not none or digest"),  # which would verify nothing
]


@pytest.mark.parametrize(("given", "says"), WRONG)
def test_a_value_that_cannot_be_used_names_its_field(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        Config(**given)
    with pytest.raises(ConfigError, match=re.escape(says)):
        replace(Config(), **given)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KVRDMA_SECRET", "short"),
        ("KVRDMA_LEASE_S", "nan"),
        ("KVRDMA_LEASE_S", "-1"),
        ("KVRDMA_LEASE_S", "30s"),
        ("KVRDMA_FENCE_SLOTS", "0"),
        ("KVRDMA_FENCE_SLOTS", "4k"),
        ("KVRDMA_FENCE_SLOTS", "²"),
        ("KVRDMA_INSECURE", "yes"),
        ("KVRDMA_ALLOW_PEERS", " , "),  # not: everybody
        ("KVRDMA_ALLOW_PEERS", "10.0.0.0/33"),
        ("KVRDMA_TRANSPORTS", ","),
        ("KVRDMA_TRANSPORTS", "cma,ucx,cma"),
        ("KVRDMA_ADVERTISE", "[::1]:5"),
        ("KVRDMA_BIND", "10.0.0.1"),
        ("KVRDMA_BIND", "10.0.0.1:port"),
        ("KVRDMA_VERIFY", "yes"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        Config.from_env({name: text})


def test_what_can_be_used() -> None:
    config = Config(advertise="fe80::1%eth0", allow_peers=["host", "10.0.0.0/8", "::1"], lease_s=1)  # type: ignore[arg-type]
    assert list(config.allow_peers) == ["host", "10.0.0.0/8", "::1"]


@pytest.mark.parametrize("text", ["host:0", "0.0.0.0:65535", "[::1]:0", "[::]:7000", "[fe80::1%eth0]:5"])
def test_where_an_engine_may_listen(text: str) -> None:
    assert str(Endpoint.parse(Config(bind=text).bind)) == text


def test_a_secret_is_not_shown() -> None:
    assert "0123456789abcdef" not in repr(Config(secret="0123456789abcdef"))


@pytest.mark.parametrize("host", ["a..b", "x" * 100, "\udcff", "é" * 70, "a\0b", " ", ""])
def test_hosts_that_no_resolver_takes(host: str) -> None:
    with pytest.raises(UnreachableError, match="cannot be looked up"):
        Endpoint(host, 5).resolve()
