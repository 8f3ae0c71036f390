"""A small decoder in plain PyTorch with paged KV caches: an engine that is not vLLM, for the other examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as nnf

from kvrdma.agent import CacheFacts, ModelInput

LAYERS, VOCAB, HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS = 3, 101, 4, 2, 16, 8, 64
HIDDEN = HEADS * HEAD_DIM
FACTS = CacheFacts(model={"model": "small transformer", "weights": "seed 0"}, block_size=BLOCK, num_kv_heads=KV_HEADS)

Caches = list[torch.Tensor]


def make_caches(heads: int = KV_HEADS, layers: int = LAYERS) -> Caches:
    """One cache per layer, `[blocks, kv heads, tokens, keys and values]`."""
    return [torch.zeros(BLOCKS, heads, BLOCK, 2 * HEAD_DIM) for _ in range(layers)]


def make_batch(prompts: Sequence[Sequence[int]], blocks: Sequence[Sequence[int]]) -> ModelInput:
    """Prompts of different lengths, each in blocks of its own."""
    slots = [
        ids[p // BLOCK] * BLOCK + p % BLOCK
        for prompt, ids in zip(prompts, blocks, strict=True)
        for p in range(len(prompt))
    ]
    tokens = [token for prompt in prompts for token in prompt]
    return ModelInput(torch.tensor(tokens), [len(prompt) for prompt in prompts], torch.tensor(slots))


@dataclass
class SmallTransformer:
    """The layers of one pipeline stage, with weights that depend on nothing but their names."""

    first: int = 0
    last: int = LAYERS
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the weights."""
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(0)
        sizes = {"q": HIDDEN, "kv": 2 * KV_HEADS * HEAD_DIM, "o": HIDDEN, "up": 2 * HIDDEN}
        self.weights = {name: torch.randn(VOCAB, HIDDEN, generator=generator) for name in ("embed", "head")}
        for layer in range(LAYERS):
            for name, size in sizes.items():
                self.weights[f"{name}{layer}"] = torch.randn(size, HIDDEN, generator=generator) / HIDDEN**0.5
            self.weights[f"down{layer}"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) / HIDDEN**0.5

    def prefill(self, batch: ModelInput, caches: Caches, states: torch.Tensor | None = None) -> torch.Tensor:
        """Fill the caches with every prompt of a batch; `[tokens, hidden]`."""
        done, start = [], 0
        for length in batch.seq_lens:
            end = start + length
            hidden = self.weights["embed"][batch.input_tokens[start:end]] if states is None else states[start:end]
            done.append(self._run(hidden, batch.slot_mapping[start:end], batch.slot_mapping[start:end], caches))
            start = end
        return torch.cat(done)

    def decode(self, token: int, blocks: Sequence[int], position: int, caches: Caches) -> torch.Tensor:
        """Compute one more token of a sequence; its hidden state `[1, hidden]`."""
        slots = torch.tensor([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(position + 1)])
        return self._run(self.weights["embed"][[token]], slots[-1:], slots, caches)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score the vocabulary, `[tokens, vocabulary]`."""
        return nnf.layer_norm(hidden, (HIDDEN,)) @ self.weights["head"].T

    def generate(
        self, hidden: torch.Tensor, length: int, blocks: Sequence[int], caches: Caches, count: int
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Decode greedily after a prefill that ended with `hidden`, `[1, hidden]`; tokens and their logits."""
        tokens, scores = [], []
        for position in range(length, length + count):
            scores.append(self.logits(hidden)[-1])
            tokens.append(int(scores[-1].argmax()))
            hidden = self.decode(tokens[-1], blocks, position, caches)
        return tokens, scores

    def _run(self, hidden: torch.Tensor, new: torch.Tensor, slots: torch.Tensor, caches: Caches) -> torch.Tensor:
        """Put new tokens into their slots and let them look at all of the sequence's."""
        for layer, cache in zip(range(self.first, self.last), caches, strict=True):
            normed = nnf.layer_norm(hidden, (HIDDEN,))
            kv = (normed @ self.weights[f"kv{layer}"].T).view(-1, KV_HEADS, 2 * HEAD_DIM)
            cache[new // BLOCK, :, new % BLOCK] = kv
            queries = (normed @ self.weights[f"q{layer}"].T).view(-1, HEADS, HEAD_DIM)
            seen = cache[slots // BLOCK, :, slots % BLOCK].repeat_interleave(HEADS // KV_HEADS, dim=1)
            hidden = hidden + self._attend(queries, seen) @ self.weights[f"o{layer}"].T
            normed = nnf.layer_norm(hidden, (HIDDEN,))
            hidden = hidden + nnf.gelu(normed @ self.weights[f"up{layer}"].T) @ self.weights[f"down{layer}"].T
        return hidden

    def _attend(self, queries: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        keys, values = seen[..., :HEAD_DIM], seen[..., HEAD_DIM:]
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / HEAD_DIM**0.5
        late = torch.ones(scores.shape[1:], dtype=torch.bool).tril(seen.shape[0] - queries.shape[0])
        weights = scores.masked_fill(~late, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(-1, HIDDEN)
