"""Processes of a benchmark that do not answer are told apart from those that have ended."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from kvrdma.bench.command import answer_of


def test_a_process_that_ends_is_not_waited_for() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=os._exit, args=(3,), daemon=True)
    process.start()
    with pytest.raises(RuntimeError, match="the other has ended with exit code 3"):
        answer_of(process, pipe, 600, "the other")
    theirs.close()


def test_a_process_that_is_silent_is_waited_for_as_long_as_it_may_take() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=time.sleep, args=(600,), daemon=True)
    process.start()
    with pytest.raises(TimeoutError, match=r"the other does not answer within 0\.05 s"):
        answer_of(process, pipe, 0.05, "the other")
    theirs.send("late")
    assert answer_of(process, pipe, 600, "the other") == "late"
    process.kill()
    process.join()
