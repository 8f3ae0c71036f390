"""Prefills a batch in one process and decodes it in another: the logits are the same, bit for bit."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

from kvrdma.agent import AgentConfig, KVTransferAgent, TransferConfig

try:
    import blake3  # noqa: F401 - makes the keys of a store
    import torch
    from small_transformer import FACTS, SmallTransformer, make_batch, make_caches
except ImportError as error:
    sys.exit(f"{error}: in the clone of kvrdma, pip install '.[store,torch]' brings what this example needs")

PROMPTS = [[token % 101 for token in range(start, start + length)] for start, length in ((3, 21), (40, 8), (7, 30))]
BLOCKS = [[5, 2, 9, 1], [30, 8], [11, 4, 12, 0, 6]]
NEW_TOKENS = 6


def prefill(pipe: Connection) -> None:
    """Compute the prompts and serve them; also decode them here, to compare."""
    options = {"serve_bytes": 16 << 20}
    config = AgentConfig(TransferConfig(kv_role="kv_producer", kv_connector_extra_config=options), FACTS)
    model, caches, batch = SmallTransformer(), make_caches(), make_batch(PROMPTS, BLOCKS)
    with KVTransferAgent(0, 0, config) as agent:
        hidden = model.prefill(batch, caches)
        agent.send_kv_caches_and_hidden_states(model, batch, caches, hidden)
        ends = torch.tensor(batch.seq_lens).cumsum(0)
        expected = [
            model.generate(hidden[end - 1 : end], len(prompt), blocks, caches, NEW_TOKENS)
            for end, prompt, blocks in zip(ends, PROMPTS, BLOCKS, strict=True)
        ]
        pipe.send((str(agent.connector.server.endpoint), expected))  # type: ignore[attr-defined]
        pipe.recv()


def main() -> None:
    """Decode what the other process has prefilled, in other blocks."""
    if sys.argv[1:]:
        sys.exit(f"{__doc__}\n\nusage: prefill_decode.py")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prefill, args=(theirs,))
    process.start()
    endpoint, expected = ours.recv()
    config = AgentConfig(TransferConfig(kv_role="kv_consumer", kv_connector_extra_config={"stores": [endpoint]}), FACTS)
    blocks = [[1, 2, 3, 4], [20, 21], [10, 11, 12, 13, 14]]
    model, caches, batch = SmallTransformer(), make_caches(), make_batch(PROMPTS, blocks)
    with KVTransferAgent(0, 0, config) as agent:
        hidden, bypass, batch = agent.recv_kv_caches_and_hidden_states(model, batch, caches)
        assert bypass
        assert hidden is not None
        ends = torch.tensor(batch.seq_lens).cumsum(0)
        for end, prompt, ids, (tokens, logits) in zip(ends, PROMPTS, blocks, expected, strict=True):
            ours_too, scores = model.generate(hidden[end - 1 : end], len(prompt), ids, caches, NEW_TOKENS)
            equal = all(torch.equal(one, two) for one, two in zip(scores, logits, strict=True))
            print(f"prompt of {len(prompt)} tokens: {ours_too}, logits {'equal' if equal else 'DIFFER'}")
            assert equal
            assert ours_too == tokens
    ours.send("done")
    process.join(20)


if __name__ == "__main__":
    main()
