"""What the decoders need to know of a model; the same for every backend."""

from dataclasses import dataclass
from typing import Any

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


# engine -> the families beyond these that its hook gates, as tests have it
ENGINE_FAMILIES = {
    "transformers": ("gemma3_text", "phi3"),
    "mlx-lm": ("gemma3_text", "lfm2", "phi3"),
    "vllm": ("gemma3_text",),
}


def engine_note(family: object) -> str:
    """Return which engines run a family that this project's decoders do not compute."""
    engines = [name for name, families in ENGINE_FAMILIES.items() if family in families]
    if not engines:
        return "; --engine transformers, mlx-lm and vllm read more families"
    return f"; use --engine {' or '.join([', '.join(engines[:-1]), engines[-1]] if engines[1:] else engines)}"


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model and how it computes, from its config.json."""

    family: str  # a key of ARCHITECTURES
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # "rope_type" and its numbers, see `rope.read_rope`; None: plain RoPE
    max_context: int  # tokens
    tie_embeddings: bool  # the output projection is the embedding, unless another one is stored: `weights`
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over head_dim on q and k, before RoPE
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # of config.json and generation_config.json, else of the tokenizer
    stored_dtype: str  # a key of config.DTYPE_BYTES

    @property
    def context_note(self) -> str:
        """What a refusal of a longer context adds, where the model promises one that EPS does not compute."""
        if self.rope_scaling is None or self.rope_scaling["rope_type"] != "dynamic":
            return ""
        return " (its dynamic RoPE scaling beyond that would turn every cached key anew, which EPS does not do)"
