"""Tiny models on disk whose logits depend on every token of the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 512

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_llama(folder: Path, **changes: object) -> Path:
    """Write a Llama with seeded weights: flat attention, so that every position counts, and strong values."""
    config = {**LLAMA, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    hidden, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def draw(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).mul(gain / columns**0.5)

    weights = {
        "model.embed_tokens.weight": draw(VOCAB, hidden, 16.0),
        "lm_head.weight": draw(VOCAB, hidden, 2.0),
        "model.norm.weight": torch.ones(hidden),
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        weights |= {
            layer + "self_attn.q_proj.weight": draw(queries, hidden, 0.7),
            layer + "self_attn.k_proj.weight": draw(keys, hidden, 0.7),
            layer + "self_attn.v_proj.weight": draw(keys, hidden, 4.0),
            layer + "self_attn.o_proj.weight": draw(hidden, queries, 8.0),
            layer + "mlp.gate_proj.weight": draw(wide, hidden, 1.0),
            layer + "mlp.up_proj.weight": draw(wide, hidden, 1.0),
            layer + "mlp.down_proj.weight": draw(hidden, wide, 1.0),
            layer + "input_layernorm.weight": torch.ones(hidden),
            layer + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    return weights
