"""Tiny random models of mlx-lm's own classes, and what mlx-lm makes of prompts with them."""

import importlib
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step

VOCAB = 300
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3")
_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_theta": 1e4,
    # gemma3: every second layer slides
    "sliding_window": 32,
    "sliding_window_pattern": 2,
}
# fmt: off
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"sliding_window": None},
    "gemma3_text": {"query_pre_attn_scalar": 64},  # a scale that is not 1/sqrt(D)
    # convolutions, and attention in every second layer
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
             "block_dim": 64, "block_ff_dim": 96, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
             "block_auto_adjust_ff_dim": False},
}
# fmt: on


def tiny(family: str, dtype: mx.Dtype = mx.float32, seed: int = 0, **more: Any) -> Any:
    """A model with weights drawn from `seed`, large enough that its logits differ from token to token."""
    # mlx-lm has Mistral run as Llama
    module = importlib.import_module(f"mlx_lm.models.{'llama' if family == 'mistral' else family}")
    settings = {**_COMMON, "model_type": family, **_OWN.get(family, {}), **more}
    if family == "mistral":
        settings["sliding_window"] = None
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(settings))
    if hasattr(model, "tie_word_embeddings"):
        model.tie_word_embeddings = True
    model.update(tree_map(lambda one: 0.2 * mx.random.normal(one.shape) + (one.ndim == 1), model.parameters()))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def alone(model: Any, prompt: Sequence[int], most: int = 8, chunk: int = 128, cache: Any = None) -> Any:
    """(tokens, logprobs [most, V]) as `generate_step` continues a prompt."""
    said = list(generate_step(mx.array(prompt), model, max_tokens=most, prefill_step_size=chunk, prompt_cache=cache))
    return [token for token, _ in said], mx.stack([logprobs for _, logprobs in said])


def together(model: Any, first: list[list[int]], later: list[list[int]], most: int = 8, chunk: int = 128) -> Any:
    """{prompt: tokens}, {prompt: logprobs} of a continuous batch that `later` prompts join and sequences leave one by
    one."""
    generator = BatchGenerator(model, prefill_step_size=chunk)
    order = generator.insert(first, [most + index for index in range(len(first))])
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[mx.array]] = {}
    for step in range(1000):
        asked, said = generator.next()
        for one in said:
            tokens.setdefault(order.index(one.uid), []).append(one.token)
            logprobs.setdefault(order.index(one.uid), []).append(one.logprobs)
        if step == 4:
            order += generator.insert(later, [most] * len(later))
        if step > 4 and not asked and not said:
            break
    generator.close()
    assert len(tokens) == len(first) + len(later)
    return tokens, {index: mx.stack(rows) for index, rows in logprobs.items()}


def teacher_forced(model: Any, cache: Any, prompt: mx.array, tokens: mx.array, chunk: int = 128) -> mx.array:
    """Logits [steps, B, V] of a prompt [B, T] read in chunks, and of tokens [B, steps] one by one."""
    for start in range(0, prompt.shape[1], chunk):
        logits = model(prompt[:, start : start + chunk], cache=cache)
        mx.eval(logits, [one.state for one in cache])
    rows = [logits[:, -1]]
    for step in range(tokens.shape[1]):
        rows.append(model(tokens[:, step : step + 1], cache=cache)[:, -1])
        mx.eval(rows[-1])
    return mx.stack(rows)
