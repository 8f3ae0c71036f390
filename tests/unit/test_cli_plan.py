"""`kvrdma plan`: the JSON a program reads and the picture a person sees."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvrdma.cli.plan import plan_command

EXAMPLE = [
    *("--p-tp", "4", "--d-tp", "2", "--kv-heads", "8"),
    *("--p-block", "16", "--d-block", "64", "--p-layout", "HND", "--d-layout", "NHD"),
]


def run(*args: str) -> Result:
    return CliRunner().invoke(plan_command, list(args), env={"COLUMNS": "200"})


def as_json(*args: str) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_json_of_the_example() -> None:
    """Two ranks read two ranks each; 4096 tokens x 2 heads x 512 bytes x 32 layers from each."""
    found = as_json(*EXAMPLE)
    assert list(found) == ["ranks"]
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


def test_words_time_and_advice() -> None:
    output = run(*EXAMPLE, "--link", "50", "--row-ns", "600").output
    assert "reshape on ranks 0, 1: 64 pages in each of 32 layers: each page arrives as (2, 4, 2, 16, 256)" in output
    assert (
        "advice: with fragmented blocks of 16 tokens the link waits for rows (16,384 rows take 9.83 ms, the " in output
    )
    assert "bytes only 5.37 ms): blocks of 64 tokens on both sides divide the rows by 4" in output
    assert "10.10 ms with fragmented ones" in output
    big = run(*EXAMPLE, "--p-block", "64").output
    assert "advice" not in big
    assert "time at 50 GB/s" in big
    assert "none: every row lands in its final place" in run().output


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--p-tp", "3"), "8 kv heads, 3 parts"),
        (("--p-tp", "4", "--p-dcp", "3"), "dcp size 3 does not divide tp size 4"),
        (("--p-tp", "2", "--p-dcp", "2", "--interleave", "5"), "interleave 5 does not divide the block of 16"),
        (("--cached", "10", "--tokens", "5"), "--cached 10 is more than --tokens 5"),
        (("--p-pp", "3", "--layers", "2"), "3 pipeline stages for 2 layers"),
        (("--p-block", "1999", "--d-block", "2003"), "line up only every"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(args: tuple[str, ...], why: str) -> None:
    result = run(*args)
    assert result.exit_code != 0
    assert why in result.output
    assert "Traceback" not in result.output


def test_empty_request() -> None:
    (rank,) = as_json("--tokens", "0")["ranks"]
    assert [(s["rows"], s["nbytes"]) for s in rank["sources"]] == [(0, 0)]
    assert run("--tokens", "0").exit_code == 0
