"""Skips what this machine cannot run, in the open; `--require what` turns such skips into failures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest


def _gpu() -> bool:
    return Path("/dev/nvidiactl").exists() and _module("cupy")()


def _module(name: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(name) is not None


NEEDS: dict[str, Callable[[], bool]] = {
    "gpu": _gpu,
    "torch": _module("torch"),
    "vllm": _module("vllm"),
    "nvrtc": _module("cuda.bindings.nvrtc") if _module("cuda")() else lambda: False,
    "hypothesis": _module("hypothesis"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require", default="", help=f"fail instead of skip without these: {', '.join(NEEDS)}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    required = set(item.config.getoption("--require").split(","))
    for mark in item.iter_markers("needs"):
        what = mark.args[0]
        if NEEDS[what]():
            continue
        if what in required:
            pytest.fail(f"{what} is required and missing", pytrace=False)
        pytest.skip(f"needs {what}")
