"""`kvrdma plan`: the JSON a program reads and the picture a person sees."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvrdma import __version__
from kvrdma.cli.plan import plan_command
from kvrdma.cli.plan_report import ranks_text
from kvrdma.plan import TokenRange
from kvrdma.plan.report import Pair, report_pair
from kvrdma.plan.sketch import CacheSketch
from kvrdma.topology import EngineShape, RankId, Source

EXAMPLE = [
    *("--p-tp", "4", "--d-tp", "2", "--kv-heads", "8"),
    *("--p-block", "16", "--d-block", "64", "--p-layout", "HND", "--d-layout", "NHD"),
]


def run(*args: str, columns: int = 200) -> Result:
    return CliRunner().invoke(plan_command, list(args), env={"COLUMNS": f"{columns}"})


def as_json(*args: str) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_json_of_the_example() -> None:
    """Two ranks read two ranks each; 4096 tokens x 2 heads x 512 bytes x 32 layers from each."""
    found = as_json(*EXAMPLE)
    assert list(found) == ["kvrdma", "inputs", "ranks", "estimate_ms", "advice"]
    assert found["kvrdma"] == __version__
    inputs = found["inputs"]
    assert (inputs["p_tp"], inputs["d_tp"], inputs["itemsize"], inputs["link"]) == (4, 2, 2, 50.0)
    # 268 MB and the reshape of them: 5.37 ms + 0.27 ms; fragmented 16,384 rows of 600 ns: 9.83 ms + 0.27 ms.
    assert found["estimate_ms"] == {"consecutive": 5.6371, "fragmented": 10.0988}
    assert [text.partition(" ")[0] for text in found["advice"]] == ["equal", "with"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    expected = [[(0, [0, 2]), (1, [2, 4])], [(2, [4, 6]), (3, [6, 8])]]
    for rank, sources in zip(found["ranks"], expected, strict=True):
        assert set(rank) == {"rank", "sources", "reshape"}
        assert [(s["remote_rank"], s["heads"]) for s in rank["sources"]] == sources
        for source in rank["sources"]:
            assert set(source) == {"remote_rank", "heads", "tokens", "rows", "rows_posted", "nbytes"}
            assert (source["tokens"], source["nbytes"]) == (4096, 4096 * 2 * 512 * 32)
            assert (source["rows"], source["rows_posted"]) == (32 * 256, 32 * 64)
        assert rank["reshape"] == {"shape": [2, 4, 2, 16, 256], "axes": [1, 3, 0, 2, 4]}


def test_json_without_reshape_and_merging_to_one_row_a_layer() -> None:
    (rank,) = as_json("--tokens", "160", "--layers", "3")["ranks"]
    assert rank["reshape"] is None
    (source,) = rank["sources"]
    assert (source["rows"], source["rows_posted"], source["nbytes"]) == (30, 3, 160 * 8 * 512 * 3)


def test_dcp_shares_the_tokens() -> None:
    """18 tokens, interleave 4, 2 shares: rank 0 holds 0-3, 8-11, 16-17; rank 1 the other 8."""
    found = as_json("--p-tp", "2", "--p-dcp", "2", "--interleave", "4", "--tokens", "18", "--cached", "2")
    (rank,) = found["ranks"]
    assert [(s["remote_rank"], s["tokens"]) for s in rank["sources"]] == [(0, 8), (1, 8)]


def test_pipeline_stages_and_mla() -> None:
    found = as_json("--mla", "--head-dim", "576", "--p-pp", "2", "--d-tp", "2", "--layers", "5", "--tokens", "16")
    sources = [[(s["remote_rank"], s["nbytes"]) for s in rank["sources"]] for rank in found["ranks"]]
    assert sources == [[(0, 3 * 16 * 1152), (1, 2 * 16 * 1152)]] * 2


def test_layers_that_do_not_divide_are_shared_out_as_by_vllm() -> None:
    """10 layers on 4 stages: 2, 3, 3, 2."""
    found = as_json("--p-pp", "4", "--layers", "10", "--kv-heads", "1", "--head-dim", "64", "--tokens", "16")
    (rank,) = found["ranks"]
    assert [s["nbytes"] // (16 * 256) for s in rank["sources"]] == [2, 3, 3, 2]


def test_picture_colours_heads_by_source() -> None:
    result = run("--p-tp", "2", "--kv-heads", "2", "--tokens", "64")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    for head in (0, 1):
        (line,) = [text for text in lines if text.startswith("│") and text.strip("│ ").startswith(f"{head}│")]
        assert line.split("│")[2].split() == [str(head)] * 32
    assert any("consumer rank 0, a column is 2 tokens" in line for line in lines)


def test_picture_of_dcp_shows_what_a_rank_does_not_hold() -> None:
    args = ["--d-tp", "2", "--d-dcp", "2", "--p-tp", "2", "--kv-heads", "1", "--interleave", "8", "--tokens", "32"]
    lines = run(*args).output.splitlines()
    rows = [line.split("│")[2].split() for line in lines if line.startswith("│   0│")]
    assert rows == [["0", ".", "0", "."], [".", "1", ".", "1"]]


def test_colours_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = run("--p-tp", "2", "--kv-heads", "2", "--tokens", "64").output
    assert "\x1b[36m 0" in output
    assert "\x1b[33m 1" in output


def test_kv_heads_of_a_latent_are_refused() -> None:
    ended = CliRunner().invoke(plan_command, ["--mla", "--kv-heads", "4"])
    assert ended.exit_code == 2
    assert "--kv-heads with --mla" in ended.output


def test_unequal_blocks_cost_rows_where_they_are_consecutive_too() -> None:
    output = run("--p-block", "16", "--d-block", "24").output
    assert "with blocks of 16 and 24 tokens, consecutive ones too, the link waits for rows" in output


def test_words_time_and_advice() -> None:
    output = run(*EXAMPLE, "--link", "50", "--row-ns", "600").output
    assert "reshape on ranks 0, 1: 64 pages in each of 32 layers: each page arrives as (2, 4, 2, 16, 256)" in output
    assert (
        "advice: with fragmented blocks of 16 tokens the link waits for rows (16,384 rows take 9.83 ms, the " in output
    )
    assert "bytes only 5.37 ms): blocks of 64 tokens on both sides divide the rows by 4, to 4,096" in output
    assert "10.10 ms with fragmented ones" in output
    assert "advice: equal blocks on both sides (producer 16, consumer 64 tokens): then" in output
    assert output.index("equal blocks") < output.index("with fragmented blocks of 16")
    big = run(*EXAMPLE, "--p-block", "64").output
    assert "advice" not in big
    assert "time at 50 GB/s" in big
    assert "none: every row lands in its final place" in run().output


@pytest.mark.parametrize(
    ("args", "block"),
    [
        (("--p-tp", "2", "--d-tp", "2", "--p-block", "24"), 64),
        (("--p-tp", "2", "--p-dcp", "2", "--interleave", "24", "--p-block", "24", "--d-block", "16"), 72),
        (EXAMPLE, 64),
    ],
)
def test_the_advised_blocks_have_the_rows_that_are_promised(args: tuple[str, ...], block: int) -> None:
    found = as_json(*args)
    now, then = (
        max(sum(source["rows"] for source in rank["sources"]) for rank in ranks)
        for ranks in (found["ranks"], as_json(*args, "--p-block", f"{block}", "--d-block", f"{block}")["ranks"])
    )
    promised = f"blocks of {block} tokens on both sides divide the rows by {now / then:.3g}, to {then:,}"
    assert found["advice"][-1].endswith(promised)


def test_larger_blocks_are_not_advised_where_rows_stay() -> None:
    """In pages of tokens first, half of the heads is a row for each token."""
    assert as_json("--p-layout", "NHD", "--d-tp", "2")["advice"][-1].endswith(
        "blocks of 64 tokens on both sides do not make them fewer"
    )


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--p-tp", "3"), "producer: --p-tp 3 with --p-dcp 1: 8 kv heads, 3 parts"),
        (("--d-tp", "3"), "consumer: --d-tp 3 with --d-dcp 1"),
        (("--p-tp", "4", "--p-dcp", "3"), "producer: --p-dcp 3 does not divide --p-tp 4"),
        (("--p-dcp", "2"), "producer: --p-dcp 2 does not divide --p-tp 1"),
        (
            ("--p-tp", "2", "--p-dcp", "2", "--interleave", "5"),
            "producer: --interleave 5 does not divide --p-block 16",
        ),
        (("--tokens", "100000000000"), "0<=x<=10000000"),
        (("--tokens", "10000000"), "a rank may read 160,000,000 rows (32 layers, 8 heads, runs of 16 tokens)"),
        (("--itemsize", "3"), "'1', '2', '4', '8'"),
        (("--link", "nan"), "'nan' is not a finite number"),
        (("--link", "inf"), "'inf' is not a finite number"),
        (("--row-ns", "inf"), "'inf' is not a finite number"),
        (("--d-tp", "4096", "--d-pp", "8"), "consumer: --d-tp 4096 and --d-pp 8 make 32768 ranks"),
        (("--cached", "10", "--tokens", "5"), "--cached 10 is more than --tokens 5"),
        (("--p-pp", "3", "--layers", "2"), "producer: --p-pp 3 stages for --layers 2"),
        (("--p-block", "1999", "--d-block", "2003"), "line up only every"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(args: tuple[str, ...], why: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert (why in result.stderr, result.stdout) == (True, "")
    told = run(*args, "--json")
    failure = json.loads(told.stdout)
    assert list(failure) == ["kvrdma", "verified", "error", "code", "message"]
    assert (failure["verified"], failure["code"], told.exit_code) == (False, 2, 2)
    assert why in failure["message"]


def test_exit_codes_are_in_the_help() -> None:
    assert "2    wrong options, or two engines that cannot serve each other" in run("--help").output


def test_a_request_of_a_million_tokens_is_planned() -> None:
    """62,500 whole blocks, and one token of each of 8 heads."""
    (rank,) = as_json("--tokens", "1000001", "--layers", "1")["ranks"]
    assert [(s["rows"], s["tokens"]) for s in rank["sources"]] == [(62508, 1000001)]


def test_empty_request() -> None:
    (rank,) = as_json("--tokens", "0")["ranks"]
    assert [(s["rows"], s["nbytes"]) for s in rank["sources"]] == [(0, 0)]
    empty = run("--tokens", "0")
    assert empty.exit_code == 0
    assert "no tokens" in empty.output


def test_the_drawing_ends_with_the_last_token() -> None:
    assert "tokens 100..4095" in run("--cached", "100").output


def test_numbers_of_two_digits_stay_apart() -> None:
    output = run("--p-tp", "16", "--kv-heads", "16", "--tokens", "64").output
    (line,) = [text for text in output.splitlines() if text.startswith("│  10│")]
    assert line.split("│")[2].split() == ["10"] * 32


@pytest.mark.parametrize(("columns", "cells"), [(80, 24), (100, 31), (200, 32)])
def test_a_drawing_keeps_to_the_width(columns: int, cells: int) -> None:
    lines = run("--p-tp", "16", "--d-tp", "4", "--kv-heads", "8", columns=columns).output.splitlines()
    (row,) = [line for line in lines if line.startswith("│   5│")]
    after = lines[lines.index(row) + 1]
    assert (row.split("│")[2].split(), after[0]) == (["10"] * cells, "└")


def test_equal_ranks_are_shown_once_and_all_on_demand() -> None:
    """64 ranks share 8 heads: 8 each read the same head of one of two producers."""
    args = ["--d-tp", "64", "--p-tp", "2", "--tokens", "64"]
    output = run(*args).output
    rows = [line.replace(" ", "") for line in output.splitlines() if line.startswith("│") and "│" in line[1:]]
    assert "│0..63│0,1│1of0..7│64│128│128│1.0│" in rows
    assert output.count("a column is") == 1
    assert "(1 of 64 consumer ranks are drawn: --all draws all)" in output
    assert "reshape on ranks 0..63: none" in output
    every = run(*args, "--all").output
    assert every.count("a column is") == 64
    assert "are drawn" not in every


def test_ranks_are_written_short() -> None:
    texts = [ranks_text(n) for n in ([3], [0, 1], [0, 1, 2], [0, 2, 4], range(0, 100, 2), [*range(9), 99])]
    assert texts == ["3", "0, 1", "0..2", "0, 2, 4", "0, 2 .. 98", "0, ... 99"]


def test_a_thousand_ranks_are_planned_as_few() -> None:
    """What is planned once is not what is different: every rank names its own source."""
    shape = EngineShape(1024, 8)
    cache = CacheSketch("HND", 16, 1, ("l",), 256, 2)
    reports = report_pair(Pair(shape, shape, cache, cache, TokenRange(0, 64)))
    assert [report.rank.rank for report in reports] == list(range(1024))
    assert [report.sources[0].source for report in reports] == [
        Source(RankId(0, rank), (rank // 128, rank // 128 + 1)) for rank in range(1024)
    ]
    assert {report.nbytes for report in reports} == {64 * 512}
    assert len({id(report.reshapes) for report in reports}) == 1
