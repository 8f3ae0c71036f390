"""kvrdma against NixlConnector on vLLM: the same model, prompts and host, in turns. Prints one JSON object per case.

``scripts/bench-vllm`` prepares what this needs. Times are of the decode engine, from a request's arrival to its first
token; the *floor* is the same prompt again, whose KV is in the engine's own cache by then.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from tests.helpers.pd import PREFILL
from tests.helpers.tiny_models import VOCAB, write_llama
from tests.helpers.vllm_engine import EngineProcess

_MODEL = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
          "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192}  # fmt: skip
_TOKEN_BYTES = 8 * 8 * 2 * 64 * 4
_HANDED = {**PREFILL, "remote_host": None, "remote_port": None}


@dataclass
class Rival:
    """One connector's pair of engines."""

    name: str
    prefill: EngineProcess
    decode: EngineProcess
    over_floor_s: dict[int, list[float]] = field(default_factory=dict)
    connector_s: dict[int, list[float]] = field(default_factory=dict)
    first_s: float = 0.0
    unused_scheduler_s: float = 0.0
    number: int = 0

    def once(self, prompt: list[int]) -> tuple[float, float, float]:
        """Run one request; time to first token, floor, and seconds inside connector calls on the engine's thread."""
        self.number += 1
        handed = self.prefill.generate(f"p{self.number}", prompt, _HANDED, max_tokens=1)
        before = self._inside()
        loaded = self.decode.generate(f"d{self.number}", prompt, handed.params, max_tokens=1)
        inside = self._inside() - before
        floor = self.decode.generate(f"f{self.number}", prompt, None, max_tokens=1)
        return loaded.elapsed_s, floor.elapsed_s, inside

    def _inside(self) -> float:
        seen = self.decode.call("seen")
        return 1e-9 * float(seen["scheduler_ns"] + seen["worker_ns"])

    def unused(self, prompts: list[list[int]]) -> None:
        """Run requests that name no producer."""
        before = self.decode.call("seen")["scheduler_ns"]
        for prompt in prompts:
            self.number += 1
            self.decode.generate(f"u{self.number}", prompt, None, max_tokens=8)
        after = self.decode.call("seen")["scheduler_ns"]
        self.unused_scheduler_s = 1e-9 * (after - before) / len(prompts)


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
        rival.decode.generate("warm", warm, None, max_tokens=2)
        rival.decode.call("profile")
        rival.first_s = rival.once(_prompt(source, 512))[0]
    for length in lengths:
        for turn in range(repeats + 1):
            for rival in rivals if turn % 2 else rivals[::-1]:
                loaded, floor, inside = rival.once(_prompt(source, length))
                if turn:  # the first of each length warms up
                    rival.over_floor_s.setdefault(length, []).append(loaded - floor)
                    rival.connector_s.setdefault(length, []).append(inside)
    for rival in rivals:
        rival.unused([_prompt(source, 64) for _ in range(20)])


def _report(rivals: list[Rival], lengths: list[int]) -> None:
    for rival in rivals:
        for length in lengths:
            case = {
                "connector": rival.name,
                "tokens": length,
                "mib": length * _TOKEN_BYTES / 2**20,
                "ttft_over_floor_ms": round(1e3 * statistics.median(rival.over_floor_s[length]), 2),
                "in_connector_calls_ms": round(1e3 * statistics.median(rival.connector_s[length]), 3),
            }
            click.echo(json.dumps(case))
        rest = {"connector": rival.name, "first_request_ms": round(1e3 * rival.first_s, 1),
                "scheduler_unused_us_per_request": round(1e6 * rival.unused_scheduler_s, 1)}  # fmt: skip
        click.echo(json.dumps(rest))


@click.command()
@click.option("--nixl", default="", help="Folder to import nixl from; without it only kvrdma is measured.")
@click.option("--tokens", default="512,4096", help="Prompt lengths.")
@click.option("--repeats", default=7, help="Measured requests per connector and length.")
def main(nixl: str, tokens: str, repeats: int) -> None:
    """Compare the connectors."""
    lengths = [int(each) for each in tokens.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_llama(Path(folder), **_MODEL))
        rivals = [_start("kvrdma", model, {}, [])]
        if nixl:
            theirs = {"kv_connector": "NixlConnector", "kv_connector_module_path": None}
            rivals.append(_start("nixl", model, theirs, [nixl]))
        try:
            _measure(rivals, lengths, repeats)
            _report(rivals, lengths)
        finally:
            for rival in rivals:
                rival.decode.close()
                rival.prefill.close()


if __name__ == "__main__":
    main()
