"""The examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.mark.needs("torch")
@pytest.mark.needs("cma")
def test_two_processes() -> None:
    ended = subprocess.run(
        [sys.executable, EXAMPLES / "two_processes.py"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    # 4 layers of 100 tokens, 8 heads, keys and values of 64 bfloat16
    assert f"consumer: {4 * 100 * 8 * 2 * 64 * 2} bytes" in ended.stdout
    assert "producer: request 7: every consumer is done" in ended.stdout
    assert len((EXAMPLES / "two_processes.py").read_text().splitlines()) < 60


@pytest.mark.needs("torch")
@pytest.mark.needs("cma")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("kv_store.py", ["engine 2: 40 of 43 tokens found", "engine 3: 45 of 45 tokens found"]),
        ("prefill_decode.py", [f"prompt of {length} tokens" for length in (21, 8, 30)]),
    ],
)
def test_agents(name: str, says: list[str]) -> None:
    ended = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert all(text in ended.stdout for text in says), ended.stdout
    assert "DIFFER" not in ended.stdout


def test_pd_serve_says_what_it_lacks_before_it_starts_anything(tmp_path: Path) -> None:
    bare = tmp_path / "python"  # without site-packages
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    script = tmp_path / "examples/pd_serve.sh"  # beside no .venv
    script.parent.mkdir()
    script.write_text((EXAMPLES / "pd_serve.sh").read_text())
    env = {"PATH": os.environ["PATH"], "PYTHON": str(bare), "TMPDIR": str(tmp_path)}
    before = set(tmp_path.rglob("*"))
    ended = subprocess.run(["bash", script], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    for name in ("vllm", "tokenizers", "kvrdma"):
        assert f"No module named '{name}'" in ended.stderr
    assert "scripts/setup dev" in ended.stderr
    assert "waiting for two servers" not in ended.stderr
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["kv_store.py", "prefill_decode.py"])
def test_an_example_says_what_it_needs(name: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, EXAMPLES / name], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "pip install '.[store,torch]'" in ended.stderr
