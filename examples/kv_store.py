"""Two engines share a system prompt through a KV store: the second finds it computed, after the first has gone."""

from __future__ import annotations

import logging
import sys

from kvrdma.agent import AgentConfig, KVTransferAgent, TransferConfig
from kvrdma.config import Config
from kvrdma.errors import ConfigError
from kvrdma.store import StoreServer

try:
    import blake3  # noqa: F401 - makes the keys of a store
    import torch
    from small_transformer import BLOCK, FACTS, SmallTransformer, make_batch, make_caches
except ImportError as error:
    sys.exit(f"{error}: in the clone of kvrdma, pip install '.[store,torch]' brings what this example needs")

SYSTEM = [(7 * token) % 101 for token in range(5 * BLOCK)]
QUESTIONS = [[1, 2, 3, 4, 5], [9, 8, 7]]


def run(name: str, stores: list[str], prompt: list[int]) -> tuple[list[int], int]:
    """One engine: takes what the store has, computes what it has not, and offers that; new tokens, tokens found."""
    config = AgentConfig(TransferConfig(kv_connector_extra_config={"stores": stores}), FACTS)
    model, caches, blocks = SmallTransformer(), make_caches(), list(range(8))
    batch = make_batch([prompt], [blocks])
    with KVTransferAgent(0, 0, config) as agent:
        hidden, bypass, batch = agent.recv_kv_caches_and_hidden_states(model, batch, caches)
        found = len(prompt) if bypass else batch.context_lens[0]
        if not bypass:
            hidden = model.prefill(batch, caches)
            agent.send_kv_caches_and_hidden_states(model, batch, caches, hidden)
        assert isinstance(hidden, torch.Tensor)
        tokens, _ = model.generate(hidden[-1:], len(prompt), blocks, caches, 6)
    print(f"{name}: {found} of {len(prompt)} tokens found in the store, continued with {tokens}")
    return tokens, found


def share(stores: list[str]) -> list[int]:
    """Let three engines use the stores, one after another; the tokens that each found there."""
    first, before = run("engine 1", stores, SYSTEM + QUESTIONS[0])
    other, shared = run("engine 2", stores, SYSTEM + QUESTIONS[1])
    again, all_of_it = run("engine 3", stores, SYSTEM + QUESTIONS[0])
    assert again == first
    assert other != first
    return [before, shared, all_of_it]


def main() -> None:
    """Use the stores given as HOST:PORT, which may know the prompts already, or one of our own."""
    if any(word.startswith("-") for word in sys.argv[1:]):
        sys.exit(f"{__doc__}\n\nusage: kv_store.py [HOST:PORT ...]: stores of `kvrdma store serve`")
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # why a store that does not answer is a miss
    if sys.argv[1:]:
        try:
            share(sys.argv[1:])
        except ConfigError as error:
            sys.exit(f"kv_store.py: {error}")
        print(*(f"`kvrdma store stats {store}` has its numbers" for store in sys.argv[1:]), sep="\n")
        return
    with StoreServer(64 << 20, Config.from_env()) as store:
        assert share([str(store.endpoint)]) == [0, len(SYSTEM), len(SYSTEM) + len(QUESTIONS[0])]
        print({name: value for name, value in store.stats().items() if name in {"blocks", "hits", "filled", "evicted"}})


if __name__ == "__main__":
    main()
