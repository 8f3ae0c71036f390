"""The smoke part of the RDMA lane, from outside: boots the guest, reads what it left."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.rdma.smoke_guest import ROOT, boot

RESULTS = ROOT / ".deps/rdma-guest/results/smoke"
DEADLINE_S = 600.0
"""It takes a sixth of that beside other work; a guest that hangs takes all of it."""


def last_lines(path: Path, count: int = 60) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:]) if path.exists() else f"no {path.name}"


@pytest.mark.needs("rdma-guest")
@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60.0)
def test_what_runs_in_the_guest_passes() -> None:
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    ended = "ended"
    try:
        boot(RESULTS, DEADLINE_S)
    except subprocess.TimeoutExpired:
        ended = "was killed at its deadline"
    said = f"the guest {ended}; see {RESULTS}\n{last_lines(RESULTS / 'log')}\n{last_lines(RESULTS / 'console')}"
    assert (RESULTS / "smoke.xml").exists(), said
    suite = ET.parse(RESULTS / "smoke.xml").getroot().find("testsuite")
    assert suite is not None, said
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": 10, "failures": 0, "errors": 0, "skipped": 0}, said
    assert (RESULTS / "status").read_text().strip() == "0", said
