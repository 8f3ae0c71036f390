"""What the README says of parts by name is so."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _rows() -> list[tuple[list[str], str, list[str]]]:
    text = (ROOT / "README.md").read_text()
    lines = text.partition("## The parts by name")[2].partition("\n## ")[0].splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    return [
        (re.findall(r"`(.+?)`", parts), re.findall(r"`(.+?)`", module)[0], re.findall(r"`(.+?)`", test))
        for parts, module, _, test in cells
    ]


def test_every_part_is_listed() -> None:
    assert len(_rows()) == 8


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's and torch's, at import
@pytest.mark.parametrize(("parts", "module", "tests"), _rows(), ids=lambda value: str(value)[:40])
def test_a_part_is_where_the_table_says_and_its_test_names_it(parts: list[str], module: str, tests: list[str]) -> None:
    if module == "kvrdma.connector":
        pytest.importorskip("vllm")
    found = importlib.import_module(module)
    texts = "".join((ROOT / test).read_text() for test in tests)
    helpers = "".join(path.read_text() for path in (ROOT / "tests/helpers").glob("*.py"))
    for part in parts:
        assert hasattr(found, part), part
        assert part in texts + helpers, f"{part} is in none of {tests}"
