"""scripts/gpu-check says what it lacks and prints one JSON line a result; neither needs a GPU to see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import __main__ as gpu_check

RESULTS = """
import pytest
def test_figure(record_property): record_property("ratio", 0.5)
def test_wrong(): assert 1 == 2
def test_skipped(): pytest.skip("not here")
"""
PLUGIN = "import sys, pytest; from tests.gpu.__main__ import JsonLines; pytest.main(sys.argv[1:], [JsonLines()])"


def test_missing_wheels_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "WHEELS", {"json": "never", "no_such_a": "wheel-a", "no_such_b": "wheel-b"})
    assert gpu_check.main() == 2
    assert capsys.readouterr().err == "gpu-check: missing wheels, install: wheel-a; wheel-b\n"


def test_a_machine_without_gpu_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "WHEELS", {})
    monkeypatch.setattr(Path, "exists", lambda _path: False)
    assert gpu_check.main() == 2
    assert "no NVIDIA GPU here" in capsys.readouterr().err


def test_every_result_is_one_json_line(tmp_path: Path) -> None:
    (tmp_path / "test_results.py").write_text(RESULTS)
    options = ["-c", "/dev/null", "-p", "no:terminal", "-p", "no:cacheprovider", str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", PLUGIN, *options], cwd=root, capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["test"].split("::")[1] for line in lines] == ["test_figure", "test_wrong", "test_skipped"]
    assert [line["outcome"] for line in lines] == ["passed", "failed", "skipped"]
    assert lines[0]["ratio"] == 0.5
    assert "assert 1 == 2" in lines[1]["error"]


def test_script_runs_the_check() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "gpu-check"
    assert "timeout 240" in script.read_text()
    assert len(script.read_text().splitlines()) < 40
