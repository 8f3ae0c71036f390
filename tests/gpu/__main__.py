"""Runs tests/gpu and prints one JSON line for each result; ``scripts/gpu-check`` calls it.

Needs Python, numpy, torch, CuPy, pytest and an NVIDIA GPU; says what is missing and stops with status 2.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

WHEELS = {
    "numpy": "numpy",
    "torch": "torch (a CUDA build)",
    "cupy": "cupy-cuda12x or cupy-cuda13x, whichever fits the driver",
    "pytest": "pytest",
}


class JsonLines:
    """A pytest plugin that prints each result, with the figures the test recorded."""

    def pytest_runtest_logreport(self, report: object) -> None:
        when, outcome = getattr(report, "when", ""), getattr(report, "outcome", "")
        if when != "call" and outcome == "passed":
            return
        line = {
            "test": getattr(report, "nodeid", ""),
            "outcome": outcome,
            "seconds": round(getattr(report, "duration", 0.0), 3),
            **dict(getattr(report, "user_properties", ())),
        }
        if outcome != "passed":
            line["error"] = str(getattr(report, "longrepr", ""))[-2000:]
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def pytest_collectreport(self, report: object) -> None:
        if getattr(report, "outcome", "") == "failed":
            line = {"test": getattr(report, "nodeid", ""), "outcome": "failed"}
            sys.stdout.write(json.dumps({**line, "error": str(getattr(report, "longrepr", ""))[-2000:]}) + "\n")


def obstacle() -> str | None:
    """Says why nothing can be tested here, or None."""
    missing = [wheel for module, wheel in WHEELS.items() if importlib.util.find_spec(module) is None]
    if missing:
        return f"missing wheels, install: {'; '.join(missing)}"
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU here (/dev/nvidiactl is absent): run it on a machine that has one"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU: install a CUDA build that fits the driver"
    return None


def main() -> int:
    """Gives the exit status: pytest's, or 2 where nothing can be tested."""
    reason = obstacle()
    if reason is not None:
        sys.stderr.write(f"gpu-check: {reason}\n")
        return 2
    import pytest

    root = str(Path(__file__).resolve().parents[2])
    # Not the project's configuration: it names plugins that this check must not need.
    options = ["-c", "/dev/null", f"--rootdir={root}", f"--confcutdir={root}", "--import-mode=importlib"]
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning"]
    return int(pytest.main([*options, *quiet, "--require=gpu,torch", str(Path(__file__).parent)], [JsonLines()]))


if __name__ == "__main__":
    sys.exit(main())
