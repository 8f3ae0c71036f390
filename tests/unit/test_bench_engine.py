"""The engine's benchmark runs, says what it should, and its promises that do not depend on the machine hold."""

from __future__ import annotations

import json

import pytest

from kvrdma.bench import engine

TINY = engine.Shape(layers=2, heads=2, head_dim=16, tokens=64, blocks=8)


@pytest.mark.needs("cma")
def test_every_case(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "EIGHTH", TINY)
    engine.main(["--eighth", "--transport", "cma", "--pairs", "3", "--repeats", "2", "--consumers", "3"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"] for line in lines] == [
        "overhead", "overhead", "overhead", "first pull", "first pull", "digest", "description", "consumers",
    ]  # fmt: skip
    # 2 layers of 2 heads of 64 tokens, keys and values of 16 two-byte numbers
    assert lines[0]["nbytes"] == 2 * 2 * 64 * 2 * 16 * 2
    assert [line["pairs"] for line in lines[:3]] == [3, 3, 3]
    assert lines[0]["pages"] == lines[2]["pages"] == 2 * 4
    assert lines[2]["nbytes"] == 8 * 512
    assert lines[6]["bytes_per_rank"] <= 4096
    assert lines[7]["consumers"] == 3


@pytest.mark.parametrize("given", [["--pairs", "0"], ["--repeats", "none"], ["--consumers", "-1"]])
def test_counts_of_nothing_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engine.main(["--eighth", *given])
    assert "is no whole number of 1 or more" in capsys.readouterr().err


def test_what_is_refused_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        engine.main(["--eighth", "--transport", "nosuch"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("python -m kvrdma.bench.engine: transport 'nosuch' is not installed")


def test_between_which_bounds_a_median_lies() -> None:
    """Of 101 values the 41st and the 61st: 50.5 -+ 1.96 standard deviations of a binomial distribution."""
    assert engine._median_within([float(value) for value in reversed(range(101))]) == (40.0, 60.0)
    assert engine._median_within([5.0]) == (5.0, 5.0)
    assert engine._median_within([5.0, 7.0]) == (5.0, 7.0)


@pytest.mark.parametrize(
    "transport",
    [pytest.param("cma", marks=pytest.mark.needs("cma")), pytest.param("ucx", marks=pytest.mark.needs("ucx"))],
)
def test_a_rank_of_80_layers_in_one_allocation_is_described_in_4_kib(transport: str) -> None:
    size = engine.description_size(transport)["bytes_per_rank"]
    assert isinstance(size, int)
    assert size <= 4096
