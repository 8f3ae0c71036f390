"""kvrdma's log in a vLLM process: it goes where vLLM's goes, and nowhere twice."""

from __future__ import annotations

import importlib.util
import logging
import logging.handlers
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "kvrdma/connector/logs.py"  # its package imports vLLM, this file does not
OURS, THEIRS = "kvrdma_of_a_test", "vllm_of_a_test"


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """`join_logs` for loggers of this file, below a root logger with no handlers but those that are given."""
    spec = importlib.util.spec_from_file_location("connector_logs", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def work(*of_root: logging.Handler) -> None:
        monkeypatch.setattr(logging.getLogger(), "handlers", list(of_root))  # pytest's own come with the call
        module.join_logs((OURS,), THEIRS)

    return work


@pytest.fixture
def records() -> Iterator[logging.handlers.BufferingHandler]:
    """What the handler of vLLM's logger gets."""
    handler = logging.handlers.BufferingHandler(1000)
    theirs = logging.getLogger(THEIRS)
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    theirs.propagate = False
    yield handler
    for name in (OURS, THEIRS):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def test_info_arrives_once(join: Any, records: logging.handlers.BufferingHandler) -> None:  # noqa: ANN401
    below = logging.getLogger(f"{OURS}.engine.peers")
    below.info("before")
    join()
    join()
    below.info("engine p0 connected: %s", "cma")
    below.debug("more")
    assert [record.getMessage() for record in records.buffer] == ["engine p0 connected: cma"]


def test_what_somebody_has_set_up_is_left_alone(join: Any, records: logging.handlers.BufferingHandler) -> None:  # noqa: ANN401
    logger = logging.getLogger(OURS)
    logger.setLevel(logging.ERROR)
    join()
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.ERROR, True)
    logger.setLevel(logging.NOTSET)
    logger.addHandler(own := logging.NullHandler())
    join()
    assert (logger.handlers, logger.level, logger.propagate) == ([own], logging.NOTSET, True)
    assert not records.buffer


def test_a_root_logger_with_handlers_gets_it_as_before(
    join: Any,  # noqa: ANN401
    records: logging.handlers.BufferingHandler,
) -> None:
    join(logging.NullHandler())
    assert not logging.getLogger(OURS).handlers
    assert not records.buffer


def test_without_handlers_of_vllm_nothing_changes(join: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    monkeypatch.setattr(logging.getLogger(THEIRS), "handlers", [])  # pytest adds its own to those that do not propagate
    join()
    assert (logging.getLogger(OURS).handlers, logging.getLogger(OURS).propagate) == ([], True)
