"""Models for timing alone: the demo model past its context, and random weights of a Llama's shape."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from eps_core.models.config import DEMO_MODEL

# Llama 3.2 1B, whose prompt the demo's byte tokenizer makes
LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 128256, "rope_theta": 500000.0, "rope_scaling": None, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 256, "eos_token_id": 257,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def write_llama(folder: Path, config: dict[str, Any], normal: Callable[..., Any], save: Callable[..., None]) -> Path:
    """Write a Llama of weights that `normal(*shape)` draws about 0, norms about 1, with the demo's tokenizer."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden), "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    weights = {"model.norm.weight": normal(hidden) + 1}
    weights["model.embed_tokens.weight"] = normal(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = normal(hidden) + 1
    save(weights, folder / "model.safetensors")
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def demo(folder: Path, context: int) -> Path:
    """Copy the demo model, so that it is allowed to run past its context."""
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    return folder


def llama_1b(folder: Path, context: int) -> Path:
    """Write LLAMA_1B in bfloat16, 2.5 GB, with a standard deviation of 0.02."""
    import ml_dtypes

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    return write_llama(folder, {**LLAMA_1B, "max_position_embeddings": context}, normal, save_file)


MODELS = {"demo": demo, "llama-1b": llama_1b}
