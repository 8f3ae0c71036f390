"""The scripts say what they do before they do anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.name for path in (ROOT / "scripts").iterdir() if os.access(path, os.X_OK) and path.suffix != ".sbatch"
)


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A clone in which nothing has been set up."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


def test_all_scripts_are_found() -> None:
    assert {"run", "setup", "test", "check", "bench-vllm", "chaos", "soak", "gpu-check", "test-rdma"} <= set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("options", [("--help",), ("-h",), ("--repeats", "2", "--help")], ids=" ".join)
def test_help_is_the_comment_at_the_top_and_makes_nothing(name: str, options: tuple[str, ...], copy: Path) -> None:
    before = files(copy)
    script = f"scripts/{name}"
    ended = subprocess.run([script, *options], cwd=copy, capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    comment = [line for line in (copy / script).read_text().splitlines()[1:] if line.startswith("#")]
    said = ended.stdout.splitlines()
    assert said == [line.removeprefix("#").removeprefix(" ") for line in comment[: len(said)]]
    assert len(said) >= 1
    assert (copy / script).read_text().splitlines()[len(said) + 1].startswith(("set -eu", "#!")), "the whole comment"
    assert files(copy) == before


def test_setup_refuses_a_level_that_does_not_exist(copy: Path) -> None:
    before = files(copy)
    ended = subprocess.run(
        ["scripts/setup", "devel"], cwd=copy, capture_output=True, text=True, timeout=20, check=False
    )
    assert ended.returncode == 2
    assert "no level 'devel'" in ended.stderr
    assert files(copy) == before


def test_two_setups_take_turns(copy: Path) -> None:
    """The second waits while the lock is held, and finds that nothing is left to do."""
    (copy / ".deps").mkdir()
    (copy / ".venv/bin").mkdir(parents=True)
    (copy / ".venv/bin/python").symlink_to("/bin/false")  # it fails where it is used
    for folder in ("kvrdma", "transports"):
        (copy / folder).mkdir()
    (copy / "pyproject.toml").touch()
    holder = ["flock", ".deps/setup.lock", "cat"]  # until its stdin ends
    with subprocess.Popen(holder, cwd=copy, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write(b"held\n")
        first.stdin.flush()
        assert first.stdout.readline() == b"held\n"
        with subprocess.Popen(["scripts/setup"], cwd=copy, stderr=subprocess.PIPE, text=True) as second:
            assert second.stderr is not None
            assert "waiting" in second.stderr.readline()
            assert second.poll() is None
            first.stdin.close()
            rest = second.stderr.read()
            assert "making .venv" in rest
            assert second.wait(20) == 1  # of /bin/false
