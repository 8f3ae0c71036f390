"""The circuit breaker: every transition, and two threads after one probe."""

from __future__ import annotations

import logging
import threading

import pytest

from kvrdma.breaker import CircuitBreaker
from kvrdma.errors import ConfigError
from kvrdma.testing import FakeClock

COOLDOWN, THRESHOLD, WINDOW = 10.0, 3, 4.0


@pytest.mark.parametrize(
    ("script", "allows", "is_open"),
    [
        # f failure, s success, a allow (as a probe), digits wait so many seconds
        ("", True, False),
        ("ff", True, False),
        ("fff", False, True),
        ("ffsff", True, False),
        ("fff9", False, True),
        ("fff91", True, False),  # the probe
        ("fff91a", False, False),  # everybody else is held
        ("fff91a3", False, False),
        ("fff91a31", True, False),  # that probe never reported: the next
        ("fff91af", False, True),  # the probe failed
        ("fff91af91", True, False),
        ("fff91as", True, False),  # it succeeded: closed, and counting anew
        ("fff91asff", True, False),
        ("fff91asfff", False, True),
        ("fff5f9", False, True),  # a failure while open opens it anew
        ("fff5f91", True, False),
        ("fffs", True, False),
    ],
)
def test_transitions(script: str, allows: bool, is_open: bool) -> None:
    clock = FakeClock()
    breaker = CircuitBreaker("p", COOLDOWN, THRESHOLD, WINDOW, clock)
    for step in script:
        if step.isdecimal():
            clock.advance(float(step))
        else:
            {"f": breaker.record_failure, "s": breaker.record_success, "a": breaker.allow}[step]()
    assert breaker.is_open is is_open
    assert breaker.allow() is allows


def test_one_warning_per_opening(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    breaker = CircuitBreaker("p0", COOLDOWN, 2, WINDOW, clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            breaker.record_failure()
    assert [record.getMessage() for record in caplog.records] == ["circuit breaker p0 open for 10 s after 2 failures"]
    clock.advance(10)
    breaker.allow()
    breaker.record_failure()
    assert len(caplog.records) == 2


@pytest.mark.parametrize("name", ["cooldown_s", "failure_threshold", "probe_window_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_values_must_be_positive(name: str, value: float) -> None:
    values: dict[str, float] = {"cooldown_s": 1.0, "failure_threshold": 1, "probe_window_s": 1.0}
    with pytest.raises(ConfigError, match=f"circuit breaker p: {name}="):
        CircuitBreaker("p", **{**values, name: value})  # type: ignore[arg-type]


def test_of_many_threads_one_gets_the_probe() -> None:
    for _ in range(200):
        clock = FakeClock()
        breaker = CircuitBreaker("p", COOLDOWN, 1, WINDOW, clock)
        breaker.record_failure()
        clock.advance(COOLDOWN)
        together = threading.Barrier(2)
        allowed: list[bool] = []

        def probe(together: threading.Barrier, breaker: CircuitBreaker, allowed: list[bool]) -> None:
            together.wait()
            allowed.append(breaker.allow())

        threads = [threading.Thread(target=probe, args=(together, breaker, allowed)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(allowed) == [False, True]
