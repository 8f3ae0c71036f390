"""`vllm serve` twice with a proxy in front of them, as `examples/pd_serve.sh` starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.marks import VLLM_SERVERS
from tests.helpers.ports import fixed_port

pytestmark = VLLM_SERVERS

SCRIPT = Path(__file__).parents[2] / "examples/pd_serve.sh"


def test_streamed_chats_through_a_proxy() -> None:
    """A prompt shorter than a block, a long one, one that is all here, and one that is here for the most part."""
    env = {**os.environ, "PYTHON": sys.executable, "PORT": str(fixed_port(3))}
    ended = subprocess.run(["bash", SCRIPT], env=env, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answers = re.findall(r"(\d+) tokens, (\d+) more made, finished: (\w+)", ended.stdout)
    assert [(made, reason) for _, made, reason in answers] == [("8", "length")] * 4, ended.stdout
    short, long, again, longer = (int(tokens) for tokens, *_ in answers)
    assert short < 32 < long == again < longer
    counted = dict(re.findall(r"vllm:kvrdma_(\w+) ([\d.e+]+)", ended.stdout))
    assert float(counted.get("pull_failures_total", 0)) == 0
    loaded = float(counted["tokens_loaded_total"])
    assert long <= loaded < short + long + again + longer, "what is here already is not loaded again"
