"""Tiny models and in-process engines for the tests of vLLM's hook."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from eps_core.tasks.corpus import corpus
from eps_core.tasks.needle import needle_document
from eps_cuda.integrations.vllm.adapter import spare_llvmlite
from eps_cuda.integrations.vllm.runtime import Runtime, runtime_of

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "eps_core" / "demo_model"
EXTENSION = "eps_cuda.integrations.vllm.worker.EpsWorker"
FAMILIES = {
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "mistral-window": ("MistralConfig", {"sliding_window": 64}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 32, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "query_pre_attn_scalar": 48},
    ),
    "gemma4": (  # layers 4 and 5 read K and V of 2 and 3
        "Gemma4TextConfig",
        {"head_dim": 32, "global_head_dim": 32, "num_global_key_value_heads": 2, "num_hidden_layers": 6,
         "num_kv_shared_layers": 2, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 3,
         "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 300, "pad_token_id": 258},
    ),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 64}),
}  # fmt: skip


def save(name: str, path: Path) -> Path:
    """A random model in the real format, with weights that make logits differ."""
    config_class, overrides = FAMILIES[name]
    config = getattr(transformers, config_class)(
        **{
            "vocab_size": 300, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
            "initializer_range": 0.15, "bos_token_id": 256, "eos_token_id": 257,
        } | overrides
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    return path


@contextmanager
def engine(path: Path, eps: dict[str, Any] | None = None, **more: Any) -> Iterator[Any]:
    """vLLM's `LLM`, evict afterwards."""
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": str(path), "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 2048, "block_size": 64,
        "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 256, "seed": 0,
        "worker_extension_cls": EXTENSION, "additional_config": {} if eps is None else {"eps": eps},
    }  # fmt: skip
    spare_llvmlite()
    llm = LLM(**arguments | more)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def runtime(llm: Any) -> Runtime:
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    found = next(one for layer in layers.values() if (one := runtime_of(layer)) is not None)
    return found


def stats(llm: Any) -> dict[str, Any]:
    found: dict[str, Any] = llm.collective_rpc("eps_stats")[0]
    return found


def prompts(*lengths: int, seed: int = 0, vocabulary: int = 256) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]


def needles(*lengths: int) -> tuple[list[list[int]], list[str]]:
    """Documents for the demo model, whose tokens are bytes, and their answers."""
    documents = [needle_document(corpus(), length, seed=seed, depth=0.3) for seed, length in enumerate(lengths)]
    return [list(one.prompt.encode()) for one in documents], [one.answer for one in documents]


def text(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


Said = tuple[list[int], list[dict[int, float]]]  # tokens, and by step the log-probabilities of the best


def say(llm: Any, asked: Sequence[Sequence[int]], new_tokens: int = 24, logprobs: int | None = 5) -> list[Said]:
    from vllm import SamplingParams

    drawn = SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
    )  # fmt: skip
    found = llm.generate([{"prompt_token_ids": list(one)} for one in asked], drawn, use_tqdm=False)
    return [
        (
            list(one.outputs[0].token_ids),
            [
                {token: best.logprob for token, best in step.items()} for step in one.outputs[0].logprobs or []
            ],
        )
        for one in found
    ]  # fmt: skip


def say_dense(llm: Any, asked: Sequence[Sequence[int]], new_tokens: int) -> list[Said]:
    """Switch EPS off, prefill the prompts again and decode them by the engine's own attention."""
    llm.collective_rpc("eps_set", kwargs={"on": False})
    llm.reset_prefix_cache()
    before = stats(llm)["rows"]
    said = say(llm, asked, new_tokens, logprobs=None)
    assert stats(llm)["rows"] == before
    return said
