"""Calls `kvrdma link-test` as people do, and reads what a failure prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from kvrdma.cli.link_test import link_test

SMALL = ("--nbytes", "64K", "--block", "4K,8K", "--iters", "3")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvrdma", "link-test", *arguments]


def run(
    *arguments: str, environ: Mapping[str, str] | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVRDMA_")} | dict(environ or {})
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout_s, env=env, check=False)


def failure(stdout: str) -> dict[str, Any]:
    """The one object that a failure prints."""
    found: dict[str, Any] = json.loads(stdout)
    assert list(found) == ["kvrdma", "verified", "error", "code", "message"]
    assert found["verified"] is False
    assert isinstance(found["message"], str)
    return found


def values(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    context = link_test.make_context("link-test", [])
    return dict(context.params) | changes
