"""The options of `kvrdma link-test`: what they mean, and which are refused before anything is done."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvrdma.bench import link, room
from kvrdma.bench.patterns import Shape
from kvrdma.bench.report import CaseReport, Stat
from kvrdma.cli import link_report, main
from kvrdma.cli.link_options import Size, read_options
from kvrdma.cli.link_report import size_text, unsteady
from kvrdma.config import Config
from kvrdma.errors import ConfigError
from tests.helpers.link_cli import SMALL, failure, values


def test_defaults_are_the_documented_ones() -> None:
    test = read_options(values(), Config())
    assert test.transport == "auto"
    assert [(case.pattern, case.shape.block_bytes) for case in test.cases] == [
        (pattern, block)
        for pattern in ("contig", "fragmented", "remote_contig")
        for block in (4 << 10, 32 << 10, 1 << 20)
    ]
    assert all(case.shape.nbytes == 64 << 20 for case in test.cases)
    assert (test.options.iters, test.options.budget_s, test.options.require_one_sided) == (7, 10.0, False)
    assert read_options(values(iters=20), Config()).options.budget_s is None


def test_an_explicit_shape_and_a_changed_model() -> None:
    mine = read_options(values(layers=2, kv_heads=4, head_dim=64, dtype="fp8", tokens=33, tp=2), Config())
    assert [case.shape for case in mine.cases] == [Shape(2, 3, 16 * 2 * 2 * 64)]
    assert mine.cases[0].pattern == "fragmented"
    halved = read_options(values(model="llama-3.1-8b", dtype="fp8"), Config())
    assert halved.cases[0].shape == Shape(32, 512, 32768)
    latent = read_options(values(model="deepseek-v3", tp=8, pattern=["contig"]), Config())
    assert latent.cases[0].shape == Shape(61, 512, 18432)
    assert latent.request == "deepseek-v3, tp 8: 8192 tokens"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": 2}, "also needs --kv-heads --head-dim"),
        ({"model": "gpt-2"}, "'gpt-2' is not in the table"),
        ({"block": [128 << 20]}, "--block 134217728 is larger than --nbytes"),
        ({"block": [100]}, "multiple of 8"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_options(values(**changes), Config())


@pytest.mark.parametrize(
    ("given", "changes", "says"),
    [
        ({"tp", "tokens"}, {}, "--tokens --tp|--tp --tokens only with a KV shape: give --model, or --layers"),
        ({"dtype"}, {"dtype": "fp8"}, "also needs --layers"),
        ({"block"}, {"model": "llama-3.1-8b"}, "--block with a KV shape"),
        ({"tokens"}, {"model": "deepseek-v3", "tokens": 10_000_000}, "is more than 128 GiB: give fewer --tokens"),
    ],
)
def test_no_option_is_without_effect(given: set[str], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_options(values(**changes), Config(), given)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--block", "3"), "'3' is outside 8 bytes to 128 GiB"),
        (("--block", "12"), "'12' is not a multiple of 8"),
        (("--nbytes", "0"), "'0' is outside 8 bytes to 128 GiB"),
        (("--nbytes", "1TiB"), "'1TiB' is outside 8 bytes to 128 GiB"),
    ],
    ids=" ".join,
)
def test_limits_of_sizes_are_said(arguments: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(main, ["link-test", *arguments])
    assert done.exit_code == 2
    assert says in done.stderr


def test_more_than_the_memory_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """64 MiB a read: 128 MiB on each side, and 64 MiB and 2 MiB for 16,384 rows of 4 KiB on one: 322 MiB."""
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(room, "MEMINFO", meminfo)
    meminfo.write_text(f"MemTotal: 1000000 kB\nMemAvailable: {321 << 10} kB\n")
    done = CliRunner().invoke(main, ["link-test", "--transport", "memory", "--json"])
    assert done.exit_code == 2
    assert failure(done.stdout)["error"] == "ConfigError"
    for said in ("a pool of 128.0 MiB on each side and 66.0 MiB", "322.0 MiB on this host", "321.0 MiB are free"):
        assert said in done.stderr
    assert "a smaller --nbytes" in done.stderr


def test_running_out_of_memory_is_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("unable to allocate 1 TiB")

    monkeypatch.setattr(link, "rows_of", full)
    done = CliRunner().invoke(main, ["link-test", "--transport", "memory", "--json", *SMALL])
    assert done.exit_code == 2
    assert failure(done.stdout)["error"] == "MemoryError"
    assert "out of memory (unable to allocate 1 TiB): give smaller sizes" in done.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("4k", 4096), ("4KiB", 4096), ("1 M", 1 << 20), ("2GB", 2 << 30)]
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert Size().convert(text, None, None) == nbytes


def test_rows_far_below_their_best_are_named() -> None:
    def row(best: float, median: float) -> CaseReport:
        return CaseReport("contig", 8, 1, 1, 8, True, Stat(1, 1), Stat(1, 1), Stat(best, median), 1, 1)

    assert unsteady([row(3.0, 1.0), row(1.0, 1.0), row(0.0, 0.0)]) == ""
    assert unsteady([row(7.63, 0.21), row(1.0, 1.0)]).startswith("a row is unsteady, best up to 36 times GB/s; ")
    assert unsteady([row(7.63, 0.21), row(4.0, 1.0)]).startswith("2 rows are unsteady, best up to 36 times")


@pytest.mark.parametrize("factor", [0.5, 1e9])
def test_the_note_on_unsteady_rows_is_for_people_only(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_report, "_UNSTEADY", factor)
    shown, told = (
        CliRunner().invoke(main, ["link-test", "--transport", "memory", *SMALL, *words]) for words in ((), ("--json",))
    )
    assert (shown.exit_code, told.exit_code) == (0, 0), shown.output + told.output
    assert ("unsteady" in shown.stdout, "unsteady" in told.output) == (factor < 1, False)


def test_sizes_are_written() -> None:
    assert [size_text(n) for n in (8, 4096, 6144, 1 << 20, 3 << 30)] == ["8 B", "4 KiB", "6 KiB", "1 MiB", "3 GiB"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--nbytes", "many"),
        ("--nbytes", "0"),
        ("--block", "4K,,8K"),
        ("--pattern", "zigzag"),
        ("--transport", "pigeon"),
        ("--iters", "0"),
        ("--json", "connect", "127.0.0.1:1"),
        ("--json", "--nbytes", "0"),
        ("connect", "127.0.0.1:1", "--json", "--model", "gpt-2"),
        ("--json", "nonsense"),
        ("--tp", "2"),
        ("--block-tokens", "32"),
        ("--model", "llama-3.1-8b", "--nbytes", "1M"),
        ("connect",),
        ("connect", "127.0.0.1"),
        ("--block", "12"),
        ("--model", "gpt-2"),
        ("--tp", "3", "--model", "llama-3.1-8b"),
        ("serve", "--bind", "0.0.0.0:0"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2_and_prints_nothing_but_json_on_stdout(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRDMA_SECRET", raising=False)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    done = CliRunner().invoke(main, ["link-test", *arguments])
    assert done.exit_code == 2
    assert done.stdout == "" or failure(done.stdout)["code"] == 2
    assert bool(done.stdout) == ("--json" in arguments)
    assert done.stderr
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
