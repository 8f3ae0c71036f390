"""kvrdma against NixlConnector on vLLM: the same model, prompts and host, in turns. Prints one JSON object per case.

``scripts/bench-vllm`` prepares what this needs. Times are of the decode engine, from a request's arrival to its first
token; the *floor* is the same prompt again, whose KV is in the engine's own cache by then. Whoever does not have the
turn is frozen: NIXL's progress threads use a processor each, also in idle engines, and would slow down the others.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from tests.helpers.pd import PREFILL
from tests.helpers.tiny_models import VOCAB, write_llama
from tests.helpers.vllm_engine import EngineProcess

_MODEL = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
          "head_dim": 64, "max_position_embeddings": 8192}  # fmt: skip
_LAYER_BYTES = 8 * 2 * 64 * 4
"""Of one token."""
_HANDED = {**PREFILL, "remote_host": None, "remote_port": None}
_UNUSED_REQUESTS = 40
_IDLE_S = 60.0


@dataclass(frozen=True)
class Sample:
    """One request, in seconds."""

    loaded: float
    floor: float
    in_calls: float
    """Within the connector's methods, on the decode engine's thread."""
    decode_cpu: float
    """Processor time of the decode engine, beyond what the floor took."""
    prefill_cpu: float
    """Processor time of the prefill engine while the decode engine loads."""

    @property
    def over_floor(self) -> float:
        return self.loaded - self.floor


@dataclass
class Rival:
    """One connector's pair of engines."""

    name: str
    prefill: EngineProcess
    decode: EngineProcess
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    unused: list[float] = field(default_factory=list)
    number: int = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the processors to itself."""
        self.prefill.thaw()
        self.decode.thaw()
        yield
        deadline_s = time.monotonic() + _IDLE_S
        while self.prefill.call("left")["blocks"] and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self.prefill.freeze()
        self.decode.freeze()

    def once(self, prompt: list[int]) -> Sample:
        """Run one request: the prefill engine has most of it cached, the decode engine nothing."""
        self.number += 1
        self.decode.call("forget_prefixes")
        handed = self.prefill.generate(f"p{self.number}", prompt, _HANDED, max_tokens=1)
        inside, cpu, prefill_cpu = self._inside(), self.decode.call("cpu"), self.prefill.call("cpu")
        loaded = self.decode.generate(f"d{self.number}", prompt, handed.params, max_tokens=1)
        inside, between, prefill_cpu = (
            self._inside() - inside, self.decode.call("cpu"), self.prefill.call("cpu") - prefill_cpu,
        )  # fmt: skip
        floor = self.decode.generate(f"f{self.number}", prompt, None, max_tokens=1)
        floor_cpu = self.decode.call("cpu") - between
        return Sample(loaded.elapsed_s, floor.elapsed_s, inside, between - cpu - floor_cpu, prefill_cpu)

    def _inside(self) -> float:
        seen = self.decode.call("seen")
        return 1e-9 * float(seen["scheduler_ns"] + seen["worker_ns"])

    def without_producer(self, prompt: list[int]) -> float:
        """Run a request that names no producer; seconds within the scheduler side's methods."""
        before = self.decode.call("seen")["scheduler_ns"]
        self.number += 1
        self.decode.generate(f"u{self.number}", prompt, None, max_tokens=4)
        return 1e-9 * float(self.decode.call("seen")["scheduler_ns"] - before)


def _start(name: str, model: str, transfer: dict[str, Any], paths: list[str]) -> Rival:
    common = {"max_model_len": 4352, "max_num_batched_tokens": 4352, "num_gpu_blocks_override": 300, "paths": paths}
    roles = [("kv_producer", 5600), ("kv_consumer", 5700)]
    made = [
        EngineProcess(
            model,
            {**transfer, "kv_role": role},
            enable_prefix_caching=True,
            environ={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)},
            **common,
        )
        for role, port in roles
    ]
    prefill, decode = made
    return Rival(name, prefill, decode)


def _prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(3, VOCAB) for _ in range(length + 1)]


def _measure(rivals: list[Rival], lengths: list[int], repeats: int) -> None:
    source = random.Random(5)
    for rival in rivals:
        rival.prefill.wait_ready()
        rival.decode.wait_ready()
        warm = _prompt(source, 64)
        rival.prefill.generate("warm", warm, None, max_tokens=2)
        rival.decode.generate("warm", warm, None, max_tokens=2)
        rival.decode.call("profile")
        rival.prefill.freeze()
        rival.decode.freeze()
    prompts = [_prompt(source, length) for length in lengths]
    short = _prompt(source, 64)
    for rival in rivals:
        with rival.turn():
            rival.first.append(rival.once(_prompt(source, 512)).over_floor)
    for prompt in prompts:
        for turn in range(repeats + 1):
            for rival in rivals if turn % 2 else rivals[::-1]:
                with rival.turn():
                    sample = rival.once(prompt)
                if turn:  # the first of each length warms up
                    rival.samples.setdefault(len(prompt) - 1, []).append(sample)
    for turn in range(_UNUSED_REQUESTS):
        for rival in rivals if turn % 2 else rivals[::-1]:
            with rival.turn():
                rival.unused.append(rival.without_producer(short))


def _spread(values: list[float]) -> dict[str, float]:
    """Give median, best and worst in ms."""
    return {
        "median": round(1e3 * statistics.median(values), 3),
        "min": round(1e3 * min(values), 3),
        "max": round(1e3 * max(values), 3),
    }


def _report(rivals: list[Rival], layers: int) -> None:
    for rival in rivals:
        for length, samples in rival.samples.items():
            case = {
                "connector": rival.name,
                "tokens": length,
                "mib": length * layers * _LAYER_BYTES / 2**20,
                "ttft_over_floor_ms": _spread([each.over_floor for each in samples]),
                "floor_ms": _spread([each.floor for each in samples]),
                "in_connector_calls_ms": _spread([each.in_calls for each in samples]),
                "decode_cpu_over_floor_ms": _spread([each.decode_cpu for each in samples]),
                "prefill_cpu_ms": _spread([each.prefill_cpu for each in samples]),
            }
            click.echo(json.dumps(case))
        rest = {
            "connector": rival.name,
            "first_request_over_floor_ms": round(1e3 * rival.first[0], 1),
            "scheduler_unused_ms_per_request": _spread(rival.unused),
            "load": round(os.getloadavg()[0], 1),
        }
        click.echo(json.dumps(rest))


@click.command()
@click.option("--nixl", default="", help="Folder to import nixl from; without it only kvrdma is measured.")
@click.option("--tokens", default="512,4096", help="Prompt lengths.")
@click.option("--layers", default=8, help="Of the model: each is 4 KiB of KV per token.")
@click.option("--repeats", default=15, help="Measured requests per connector and length.")
def main(nixl: str, tokens: str, layers: int, repeats: int) -> None:
    """Compare the connectors."""
    lengths = [int(each) for each in tokens.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_llama(Path(folder), num_hidden_layers=layers, **_MODEL))
        rivals = [_start("kvrdma", model, {}, [])]
        if nixl:
            theirs = {"kv_connector": "NixlConnector", "kv_connector_module_path": None}
            rivals.append(_start("nixl", model, theirs, [nixl]))
        try:
            _measure(rivals, lengths, repeats)
            _report(rivals, layers)
        finally:
            for rival in rivals:
                rival.decode.close()
                rival.prefill.close()


if __name__ == "__main__":
    main()
