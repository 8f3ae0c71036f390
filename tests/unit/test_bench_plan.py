"""The planning benchmark, with tiny sizes."""

from __future__ import annotations

import json

import pytest

from kvrdma.bench.plan import CASES, PlanCase, main, run_plan_case


def test_every_case_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--repeats", "1", "--scale", "64"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"] for line in lines] == [case.name for case in CASES]
    assert all(line["second_ns_per_row"] > 0 for line in lines)
    by_case = {line["case"]: line for line in lines}
    assert (by_case["16k"]["rows_before"], by_case["16k contiguous"]["rows"]) == (32 * 8, 32)
    assert by_case["16k, blocks of 64 from 16, reshaped"]["reshapes"] == 1
    assert by_case["16k, blocks of 16 from 64, by head"]["rows_before"] == 32 * 4 * 4 * 8


def test_the_stated_sizes() -> None:
    """The 16k case is 32 layers x 512 blocks; contiguous blocks of a region per layer leave a row per region."""
    assert run_plan_case(CASES[1], 1).rows_before == 16384
    result = run_plan_case(PlanCase("x", 32, 512, fragmented=False, regions_per_layer=True), 1)
    assert (result.rows_before, result.rows) == (16384, 32)
