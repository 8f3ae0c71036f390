"""Prefill on one ``MiniEngine``, decode on another."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.helpers.mini_engine import MiniEngine, Shape

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


def prompt_of(length: int, seed: int = 1) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 500) for _ in range(length)]


def shape(**changes: Any) -> Shape:  # noqa: ANN401
    from tests.helpers.mini_engine import Shape

    return Shape(**changes)


def prefill(engine: MiniEngine, request_id: str, prompt: list[int]) -> dict[str, Any]:
    """Run a prompt on the producer; what a proxy hands on."""
    from tests.helpers.mini_engine import run

    engine.add(request_id, prompt, PREFILL)
    run(engine, until=lambda: request_id in engine.finished)
    return engine.params[request_id]


def decode(producer: MiniEngine, consumer: MiniEngine, prompt: list[int], request_id: str = "d") -> None:
    """Prefill on one, decode on the other up to the first step, and check every position."""
    from tests.helpers.mini_engine import run

    consumer.add(request_id, prompt, prefill(producer, "p", prompt), new=4)
    run(producer, consumer, until=lambda: consumer.status(request_id) == "RUNNING")
    assert consumer.wrong_positions(request_id, 0, len(prompt)) == []
