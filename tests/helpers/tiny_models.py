"""Tiny models on disk whose logits depend on every token of the prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file

VOCAB = 512

Draw: TypeAlias = Callable[[int, int, float], torch.Tensor]
"""Rows, columns and gain of a weight."""
Attention: TypeAlias = Callable[[dict[str, Any], Draw], dict[str, torch.Tensor]]
"""Makes the weights of one layer's attention."""

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

WINDOW = 64
SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3}
HYBRID: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
}
"""Changes that make a Llama of windows only, and one of both kinds of layers."""

DEEPSEEK: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key not in {"head_dim", "rope_theta"}},
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,  # with 64 rotated ones the only latent that vLLM's CPU kernels know
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn",  # as the real ones; with "default", vLLM 0.32 on CPU leaves most queries unturned
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "first_k_dense_replace": LLAMA["num_hidden_layers"],  # no experts
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "num_nextn_predict_layers": 0,
}


def write_llama(folder: Path, **changes: object) -> Path:
    """Write a Llama with seeded weights: flat attention, so that every position counts, and strong values."""
    config = {**LLAMA, **changes}
    return _write(folder, config, _llama_attention)


def write_deepseek(folder: Path, **changes: object) -> Path:
    """Write a DeepSeek without experts, whose KV is one latent for all heads, in the same way."""
    config = {**DEEPSEEK, **changes}
    return _write(folder, config, _latent_attention)


def _write(folder: Path, config: dict[str, Any], attention: Attention) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, attention), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(config: dict[str, Any], attention: Attention) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    hidden, wide = config["hidden_size"], config["intermediate_size"]

    def draw(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).mul(gain / columns**0.5)

    weights = {
        "model.embed_tokens.weight": draw(VOCAB, hidden, 16.0),
        "lm_head.weight": draw(VOCAB, hidden, 2.0),
        "model.norm.weight": torch.ones(hidden),
    }
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        weights |= {f"{layer}self_attn.{name}.weight": weight for name, weight in attention(config, draw).items()}
        weights |= {
            layer + "mlp.gate_proj.weight": draw(wide, hidden, 1.0),
            layer + "mlp.up_proj.weight": draw(wide, hidden, 1.0),
            layer + "mlp.down_proj.weight": draw(hidden, wide, 1.0),
            layer + "input_layernorm.weight": torch.ones(hidden),
            layer + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    return weights


def _llama_attention(config: dict[str, Any], draw: Draw) -> dict[str, torch.Tensor]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "q_proj": draw(queries, hidden, 0.7),
        "k_proj": draw(keys, hidden, 0.7),
        "v_proj": draw(keys, hidden, 4.0),
        "o_proj": draw(hidden, queries, 8.0),
    }


def _latent_attention(config: dict[str, Any], draw: Draw) -> dict[str, torch.Tensor]:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    plain, turned, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    keys_and_values = [draw(rows, latent, gain) for _ in range(heads) for rows, gain in ((plain, 0.7), (value, 4.0))]
    return {
        "q_proj": draw(heads * (plain + turned), hidden, 0.7),
        "kv_a_proj_with_mqa": draw(latent + turned, hidden, 0.7),
        "kv_a_layernorm": torch.ones(latent),
        "kv_b_proj": torch.cat(keys_and_values),
        "o_proj": draw(hidden, heads * value, 8.0),
    }
