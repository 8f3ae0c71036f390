"""Models and engines for the connector's tests."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the tiny Llama, made once."""
    from tests.helpers.tiny_models import write_llama

    return str(write_llama(Path(tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Gives the folder of the tiny model of a kind, made once."""
    from tests.helpers.model_kinds import KINDS

    return functools.cache(lambda name: str(KINDS[name].write(Path(tmp_path_factory.mktemp(name)))))


@pytest.fixture
def engines(tiny_llama: str) -> Iterator[Callable[..., Any]]:
    """Makes ``MiniEngine``s and closes them."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        from tests.helpers.mini_engine import MiniEngine

    made: list[MiniEngine] = []

    def make(name: str, role: str, *arguments: Any, **extra: Any) -> MiniEngine:  # noqa: ANN401
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.append(MiniEngine(tiny_llama, name, role, *arguments, **extra))
        return made[-1]

    yield make
    for engine in reversed(made):  # consumers first: they say goodbye
        engine.close()
