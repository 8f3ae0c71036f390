"""A vLLM server with two data-parallel ranks on either side: each rank is reached under its own port and name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.marks import VLLM_SERVERS
from tests.helpers.pd import PREFILL, prompt_of
from tests.helpers.ports import fixed_port

pytestmark = VLLM_SERVERS

RANKS = (0, 1)
START_S = 300.0
NOISE = 1e-3
ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "KVRDMA_TRANSPORTS": "cma",
}
OPTIONS = [
    "--data-parallel-size=2",
    "--dtype=float32",
    "--enforce-eager",
    "--block-size=32",
    "--max-model-len=1024",
    "--num-gpu-blocks-override=64",
    "--no-enable-prefix-caching",
    "--skip-tokenizer-init",
]


class Said(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    params: dict[str, Any] | None


@dataclass
class Server:
    """One server with two engines behind it."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def wait_ready(self) -> None:
        """Wait until it takes requests."""
        deadline_s = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except (urllib.error.URLError, TimeoutError):
                assert time.monotonic() < deadline_s, self.log.read_text()[-4000:]
                time.sleep(0.5)
            else:
                return

    def ask(self, rank: int, prompt: list[int], params: dict[str, Any] | None, max_tokens: int = 6) -> Said:
        """Complete a prompt on one rank."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {
            "return_token_ids": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "kv_transfer_params": params,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            said = json.load(answer)
        (choice,) = said["choices"]
        return Said(choice["token_ids"], choice["logprobs"]["token_logprobs"], said["kv_transfer_params"])

    def loaded(self) -> list[int]:
        """Tokens that each rank has loaded."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.findall(r'^vllm:kvrdma_tokens_loaded_total{engine="(\d)".*} (\S+)$', text, re.MULTILINE)
        return [int(float(dict(found)[str(rank)])) for rank in RANKS]

    def close(self) -> None:
        """Stop it and its engines."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def serve(model: str, folder: Path, port: int, transfer: dict[str, Any]) -> Server:
    ours = {"kv_connector": "KvRdmaConnector", "kv_connector_module_path": "kvrdma.connector"} | transfer
    log = folder / f"{transfer['kv_role']}.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", "tiny", "--kv-transfer-config", json.dumps(ours), *OPTIONS]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | ENVIRON, start_new_session=True
        )
    return Server(process, f"http://127.0.0.1:{port}", log)


@pytest.fixture
def servers(tiny_llama: str, tmp_path: Path) -> Iterator[tuple[Server, Server, int]]:
    """A prefill and a decode server, and the side channel's port of the first rank."""
    base = fixed_port(4)
    fixed = {"engine_id": "prefill", "kv_connector_extra_config": {"bind": f"127.0.0.1:{base + 2}"}}
    made = [
        serve(tiny_llama, tmp_path, base, {"kv_role": "kv_producer"} | fixed),
        serve(tiny_llama, tmp_path, base + 1, {"kv_role": "kv_consumer"}),
    ]
    try:
        for server in made:
            server.wait_ready()
        yield made[0], made[1], base + 2
    finally:
        for server in made:
            server.close()


def test_every_rank_loads_from_every_rank(servers: tuple[Server, Server, int]) -> None:
    p, d, port = servers
    before = [0, 0]
    for theirs in RANKS:
        for ours in RANKS:
            prompt = prompt_of(200 + 10 * theirs + ours, seed=2 * theirs + ours)
            alone = p.ask(theirs, prompt, None)
            params = p.ask(theirs, prompt, PREFILL, max_tokens=1).params
            assert params is not None
            assert (params["remote_engine_id"], params["remote_port"]) == (f"prefill_dp{theirs}", port + theirs)
            answer = d.ask(ours, prompt, params)
            assert answer.tokens == alone.tokens
            assert answer.logprobs == pytest.approx(alone.logprobs, abs=NOISE)
            before[ours] += len(prompt) - 1
            deadline_s = time.monotonic() + 20
            while (loaded := d.loaded()) != before and time.monotonic() < deadline_s:
                time.sleep(0.2)  # metrics come with the next step's statistics
            assert loaded == before
