"""Hands a request's KV cache from one process to another: a producer publishes it, a consumer pulls it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import torch

from kvrdma.engine import Ended, Engine, PullDone
from kvrdma.handshake import Identity
from kvrdma.page_format import LayerSpec
from kvrdma.topology import EngineShape

LAYERS, BLOCKS, HEADS, TOKENS, HEAD_DIM = 4, 32, 8, 16, 64
SPEC = LayerSpec(heads=(0, HEADS), total_heads=HEADS, block_size=TOKENS)


def make_caches(fill: int | None) -> dict[str, torch.Tensor]:
    """One cache per layer, `[blocks, heads, tokens, keys and values]`."""
    torch.manual_seed(fill or 0)
    shape = (BLOCKS, HEADS, TOKENS, 2 * HEAD_DIM)
    new = torch.zeros if fill is None else torch.randn
    return {f"layer{i}": new(shape, dtype=torch.bfloat16) for i in range(LAYERS)}


def identity(name: str) -> Identity:
    """An engine of one rank that holds every kv head."""
    return Identity(name, EngineShape(tp_size=1, num_kv_heads=HEADS), model={"model": "example"})


def produce(consumer: Connection) -> None:
    """Prefill side: publish 100 tokens that lie in blocks 3, 1, 4, 0, 5, 9 and 2."""
    with Engine(make_caches(fill=1), SPEC, identity("prefill")) as engine:
        reference = engine.publish("request 7", blocks=[3, 1, 4, 0, 5, 9, 2], num_tokens=100)
        consumer.send(reference.to_params())
        (ended,) = engine.wait(30)
        assert isinstance(ended, Ended)
        print(f"producer: {ended.request_id}: {ended.how.value}")


def main() -> None:
    """Decode side: pull them into blocks 10 to 16 of our own caches."""
    ours, theirs = multiprocessing.Pipe()
    producer = multiprocessing.get_context("spawn").Process(target=produce, args=(theirs,))
    producer.start()
    caches = make_caches(fill=None)
    with Engine(caches, SPEC, identity("decode")) as engine:
        engine.pull("request 7", ours.recv(), blocks=range(10, 17))
        (done,) = engine.wait(30)
        assert isinstance(done, PullDone), done
        expected = make_caches(fill=1)
        assert all(torch.equal(caches[n][10:16], expected[n][[3, 1, 4, 0, 5, 9]]) for n in caches)
        print(f"consumer: {done.nbytes} bytes in {done.rows_posted} rows by {done.via[0]}, {done.read_s * 1e3:.2f} ms")
    producer.join()


if __name__ == "__main__":
    main()
