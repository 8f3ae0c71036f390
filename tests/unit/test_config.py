"""Settings from the environment."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvrdma.config import VARIABLES, Config, unknown_settings

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
