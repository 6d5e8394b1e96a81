"""Tiny random models in the real Hugging Face format, written by transformers itself.

`NAMES` cover every family, tied and untied, the three storage dtypes, one file and shards, and head dims that are
not hidden / heads.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM

from eps_core import LLM
from eps_core.load import backend_name

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# as long Qwen models have it; 64 tokens are fewer than tests give
YARN_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
GLOBAL, SLIDING = "full_attention", "sliding_attention"
# 64 tokens are fewer than tests give: transformers takes the long factors, too
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.2 + 0.5 * i for i in range(8)],
}
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, GLOBAL, SLIDING, GLOBAL],
    "sliding_window": 24,
}
VOCAB_SIZE = 300
NUM_TOKENS = 75
WEIGHT_STD = 0.15  # seven times transformers' own: logits of tiny models would be nearly constant otherwise

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": WEIGHT_STD,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


@dataclass(frozen=True)
class TinyModel:
    """One model: transformers' config class, the fields that differ from the common ones, and how it is stored."""

    config_class: str
    overrides: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    max_shard_size: str = "1GB"


MODELS = {
    "llama2": TinyModel("LlamaConfig", {"num_key_value_heads": 4}),
    "llama2-bf16-sharded": TinyModel("LlamaConfig", dtype="bfloat16", max_shard_size="60KB"),
    "llama2-linear-biased": TinyModel(
        "LlamaConfig",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama3.1-tied-sharded": TinyModel(
        "LlamaConfig",
        {"rope_parameters": LLAMA3_SCALING, "tie_word_embeddings": True, "head_dim": 32},
        max_shard_size="100KB",
    ),
    "mistral": TinyModel("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2-tied": TinyModel("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-fp16": TinyModel("Qwen2Config", dtype="float16"),
    "llama2-dynamic": TinyModel(
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}},
    ),
    "qwen2-yarn": TinyModel("Qwen2Config", {"rope_parameters": YARN_SCALING}),
    "llama2-yarn-numbers": TinyModel(
        "LlamaConfig",
        {
            "rope_parameters": YARN_SCALING
            | {"mscale": 1.3, "mscale_all_dim": 0.4, "beta_fast": 16, "beta_slow": 2.0, "truncate": False}
        },
    ),
    "qwen3": TinyModel("Qwen3Config", {"head_dim": 32}),
    "qwen3-tied-biased": TinyModel(
        "Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}
    ),
    "mistral-window": TinyModel("MistralConfig", {"sliding_window": 20, "head_dim": 16}),
    "qwen2-window": TinyModel(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "phi3": TinyModel(
        "Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "pad_token_id": 0}
    ),
    "phi3-short-window": TinyModel(
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512, "pad_token_id": 0}
        | {"sliding_window": 30, "num_key_value_heads": None},
    ),
    "gemma3": TinyModel("Gemma3TextConfig", GEMMA3 | {"head_dim": 32, "query_pre_attn_scalar": 11}),
    "gemma3-256-scaled-capped": TinyModel(
        "Gemma3TextConfig",
        GEMMA3
        | {
            "head_dim": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
            "rope_parameters": {
                GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 5_000.0},
            },
        },
        dtype="bfloat16",
    ),
}  # fmt: skip
NAMES = tuple(MODELS)
_ROOT = TemporaryDirectory(prefix="eps-tests-")


def make_config(name: str) -> Any:
    """transformers' config object of the named model."""
    model = MODELS[name]
    return getattr(transformers, model.config_class)(**COMMON | model.overrides)


def save_model(name: str, path: Path, seed: int = 0, change: Callable[[Any], None] = lambda model: None) -> Path:
    """Writes the named model with weights drawn from `seed`, then changed by `change`, and a byte-level tokenizer;
    returns `path`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # norms start at 1 and biases at 0: what starts there cannot show that it is used
            if parameter_name.endswith("bias"):
                parameter.normal_(0.0, WEIGHT_STD)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
        change(model)
    model.to(getattr(torch, MODELS[name].dtype))
    model.save_pretrained(path, max_shard_size=MODELS[name].max_shard_size)
    save_tokenizer(path / "tokenizer.json")
    if "gemma3" in name:  # Gemma's own class wants tokens that the tiny tokenizer has not
        (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


@cache
def saved(name: str) -> Path:
    """The directory of the named model, written once."""
    return save_model(name, Path(_ROOT.name) / name)


def changed(
    path: Path,
    name: str,
    *without: str,
    config: dict[str, Any] | None = None,
    files: dict[str, Any] | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Path:
    """Writes a copy of the named model without the files of some patterns and with other values in config.json (None:
    without the key), other files (an object is JSON) and another tokenizer; returns `path`."""
    shutil.copytree(saved(name), path, dirs_exist_ok=True)
    for file in [file for pattern in without for file in path.glob(pattern)]:
        file.unlink(missing_ok=True)  # two patterns may name it
    if config is not None:
        values = json.loads((path / "config.json").read_text()) | config
        kept = {key: value for key, value in values.items() if config.get(key, key) is not None}
        files = {"config.json": kept} | (files or {})
    for file, content in (files or {}).items():
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    return path


def save_tokenizer(file: Path) -> None:
    """A tokenizer whose tokens are the 256 bytes, then <s> and </s>."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(file))


def reference_logits(path: Path, tokens: list[int]) -> Any:
    """transformers' logits [T, V] float32 (numpy) of the saved model after each token, computed in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def tokens_of(name: str) -> np.ndarray:
    """The test tokens [NUM_TOKENS] of a model."""
    return np.random.default_rng([len(name), NUM_TOKENS]).integers(0, VOCAB_SIZE, NUM_TOKENS)


@cache
def expected(name: str) -> np.ndarray:
    """transformers' float32 logits [T, V] of the named model after each of its test tokens."""
    return reference_logits(saved(name), tokens_of(name).tolist())


def open_llm(target: tuple, path: Path, kernels: str = "arrays", **settings: Any) -> LLM:
    """The model in `path` on a test's target, in float32."""
    backend, device = target
    return LLM(str(path), backend=backend_name(backend), device=device, dtype="float32", kernels=kernels, **settings)
