"""The comparison with other libraries, at a tiny size and without them."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvrdma.bench import compare, held
from kvrdma.bench.compare import Lane, Setup, lanes, markdown, run_lane
from kvrdma.bench.patterns import Bytes, Case, Shape, fill, rows_of
from kvrdma.bench.rivals.ends import serve
from kvrdma.bench.rivals.pair import Contender, ContenderError, Pair

NBYTES = 256 << 10
CASES = (Case("fragmented", Shape(1, 64, 4096)), Case("contig", Shape(1, 8, 32768)))


@pytest.mark.needs("cma")
def test_a_comparison_prints_an_object_per_case_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--same-host", "cma", "--nbytes", str(NBYTES), "--iters", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    results = [json.loads(line) for line in out if line.startswith("{")]
    assert [(result["pattern"], result["block_bytes"]) for result in results] == [
        *(("fragmented", 4096), ("fragmented", 32768), ("fragmented", NBYTES), ("contig", 32768))
    ]
    for result in results:
        assert (result["lane"], result["nbytes"], result["iters"]) == ("same host", NBYTES, 2)
        assert list(result["contenders"]) == ["memcpy", "kvrdma cma"]
        for got in result["contenders"].values():
            assert got["verified"]
            assert 0 < got["gb_per_s"]["min"] <= got["gb_per_s"]["median"] <= got["gb_per_s"]["max"]
            assert got["share_of_memcpy"] > 0 < got["steady"]["share_of_memcpy"]
            assert got["steady"]["held_ns_per_row"] > 0 < got["held_ns_per_row"]
        assert result["contenders"]["memcpy"]["share_of_memcpy"] == 1.0
    table = [line for line in out if line.startswith("|")]
    assert len(table) == 2 + 2 * len(results)


@pytest.mark.needs("ucx")
def test_the_tcp_lane_without_rivals() -> None:
    (lane,) = lanes(Setup(nixl="", mooncake="", same_host="", tcp="ucx", nbytes=NBYTES, iters=2))
    assert [contender.name for contender in lane.contenders] == ["memcpy", "kvrdma ucx"]
    assert lane.contenders[1].environ == {"UCX_TLS": "tcp"}


def test_how_long_a_caller_is_held_stands_beside_a_copy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "_RESTS_S", (0.0, 0.001))
    held.main(["--rows", "64", "--block", "512", "--iters", "1"])
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["rest_s"] for result in results] == [0.0, 0.001]
    for result in results:
        assert (result["transport"], result["rows"]) == ("cma", 64)
        assert result["held_ns_per_row"] > 0 < result["copy_ns_per_row"]


def test_rivals_run_as_they_come_and_tuned() -> None:
    setup = Setup(nixl="py1", mooncake="py2", same_host="a", tcp="b", nbytes=NBYTES, iters=2)
    near, far = lanes(setup)
    plain, tuned = near.contenders[2:]
    assert (plain.environ, plain.reader, plain.target) == ({}, {"progress_thread": True}, {"progress_thread": True})
    assert (tuned.environ, tuned.reader) == ({"UCX_CMA_TX_QUOTA": "64"}, {"progress_thread": False})
    assert [(each.name, each.python) for each in far.contenders[2:]] == [
        *(("NIXL", "py1"), ("NIXL tuned", "py1"), ("Mooncake", "py2"))
    ]


def test_a_library_that_is_not_there_says_so(tmp_path: Path) -> None:
    thread = {"progress_thread": False}
    lane = Lane("x", (Contender("NIXL", sys.executable, "nixl", thread, thread),), CASES)
    with pytest.raises(ContenderError, match=r"(?s)no answer to 'open'.*No module named 'nixl'"):
        next(run_lane(lane, 1, tmp_path))


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def state_of(status: Path) -> str:
    return status.read_text().rpartition(")")[2].split()[0]


def test_pairs_are_frozen_but_in_their_turn(tmp_path: Path) -> None:
    pair = Pair(Contender("memcpy", sys.executable, "memcpy", target=None), NBYTES * 2, tmp_path)
    try:
        (child,) = pair._children
        status = Path(f"/proc/{child._process.pid}/stat")
        assert wait_for(lambda: state_of(status) == "T")
        with pair:
            pair.load(CASES[0], 2)
            assert state_of(status) != "T"
            measured = pair.read()
        assert wait_for(lambda: state_of(status) == "T")
        assert set(measured) == {"blocking_s", "total_s", "cpu_s", "target_cpu_s"}
        assert measured["blocking_s"] <= measured["total_s"]
    finally:
        pair.end()


class Reading:
    """An end whose remote pool lies in this process; ``wrong`` is a byte it damages."""

    def __init__(self, remote: Bytes, wrong: int | None = None) -> None:
        self._remote, self._wrong = remote, wrong

    def open(self, pool: Bytes) -> bytes:
        self._pool = pool
        return b"meta"

    def connect(self, meta: bytes, remote_pool_addr: int) -> None:
        assert (meta, remote_pool_addr) == (b"meta", 4096)

    def load(self, case: Case) -> None:
        self._rows = rows_of(case, 0)

    def read(self) -> float:
        for local, _, offset, length in self._rows.tolist():
            self._pool[local : local + length] = self._remote[offset : offset + length]
        if self._wrong is not None:
            self._pool[self._wrong] ^= 1
        return 0.0

    def close(self) -> None:
        pass


def conversation(end: Reading) -> list[dict[str, object]]:
    requests = [
        {"op": "open", "nbytes": 2 * NBYTES, "generation": 0},
        {"op": "connect", "meta": "bWV0YQ==", "addr": 4096},
        {"op": "load", "pattern": "fragmented", "shape": [1, 64, 4096], "seed": 1},
        {"op": "read"},
        {"op": "verify", "generation": 5},
        {"op": "close"},
        {"op": "read"},
    ]
    replies = io.StringIO()
    serve(end, io.StringIO("".join(json.dumps(each) + "\n" for each in requests)), replies)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


def test_an_end_answers_line_by_line_until_close() -> None:
    remote = np.empty(2 * NBYTES, np.uint8)
    fill(remote, 5)
    replies = conversation(Reading(remote))
    assert len(replies) == 6
    assert replies[0]["meta"] == "bWV0YQ=="
    assert replies[4] == {"mismatch": ""}


def test_a_contender_with_wrong_bytes_is_caught() -> None:
    remote = np.empty(2 * NBYTES, np.uint8)
    fill(remote, 5)
    place = int(rows_of(CASES[0], 0)[7, 0])
    assert f"row 7 is wrong at local byte {place}" in str(conversation(Reading(remote, place))[4]["mismatch"])
    fill(remote, 4)
    assert "generation 4" in str(conversation(Reading(remote))[4]["mismatch"])


def test_the_table_is_arithmetic() -> None:
    times = [{"total_s": s, "blocking_s": 1e-3, "cpu_s": 2e-3, "target_cpu_s": 3e-3} for s in (1e-3, 2e-3, 4e-3)]
    case = Case("contig", Shape(1, 1000, 1000))  # 1 MB
    summary = compare._summary(case, times, [{"total_s": 1e-3}])
    assert summary == {
        "gb_per_s": {"min": 0.25, "median": 0.5, "max": 1.0},
        "share_of_memcpy": 0.5,
        "held_ns_per_row": 1000.0,
        "reader_cpu_ms": 2.0,
        "target_cpu_ms": 3.0,
    }
    summary["steady"] = {"gb_per_s": {"median": 0.75}, "share_of_memcpy": 0.9, "held_ns_per_row": 12.0}
    result = {
        "lane": "tcp",
        "pattern": "contig",
        "rows": 1000,
        "block_bytes": 1024,
        "contenders": {"x": summary | {"verified": True}, "y": summary | {"verified": False}},
    }
    lines = markdown([result]).splitlines()
    assert lines[2] == "| tcp | contig 1000 x 1 KiB | x | 0.50 (0.25-1.00) | 0.50 | 0.75 | 0.90 | 1000 | 12 | 2 + 3 |"
    assert lines[3].endswith("WRONG BYTES")
