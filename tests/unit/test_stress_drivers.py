"""The drivers of `scripts/check --sanitize` still compile: that runs too long for CI, and they use what changes."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

TRANSPORTS = Path(__file__).parents[2] / "transports"
DRIVERS = sorted(TRANSPORTS.glob("*/**/stress.cpp"))


def includes(package: Path) -> list[Path]:
    folders = [TRANSPORTS / "native", package, package / "src"]
    if package.name == "kvrdma_ucx":
        found = importlib.util.find_spec("libucx")
        if found is None or found.origin is None:
            pytest.skip("the headers of UCX are not installed")
        folders.append(Path(found.origin).parent / "include")
    return folders


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.relative_to(TRANSPORTS).parts[0])
def test_stress_drivers_compile(driver: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    package = TRANSPORTS / driver.relative_to(TRANSPORTS).parts[0]
    folders = [option for folder in includes(package) for option in ("-isystem", str(folder))]
    command = [compiler, "-std=c++20", "-fsyntax-only", *folders, str(driver)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr


def test_there_are_drivers() -> None:
    assert [driver.relative_to(TRANSPORTS).parts[0] for driver in DRIVERS] == ["kvrdma_cma", "kvrdma_ucx"]
