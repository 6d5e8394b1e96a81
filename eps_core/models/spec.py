"""The facts of a model that the decoders need; the same for every backend."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eps_core.errors import require


@dataclass(frozen=True)
class Rope:
    """The rotary embeddings of one layer of a model of any family."""

    rope_theta: float
    rope_scaling: dict[str, Any] | None
    head_dim: int  # of which `rotated` dimensions turn
    rotated: int
    given: dict[str, Any]  # as config.json has the scaling


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model and how it computes, from its config.json. The fields with a default are what a family may
    have beyond Llama."""

    family: str  # a key of `registry.FAMILIES`
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
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # of config.json and generation_config.json, else of the tokenizer
    stored_dtype: str  # a key of config.DTYPE_BYTES
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k, before RoPE
    output_norms: bool = False  # RMSNorm on what attention and the feed-forward block add to the residual stream
    activation: str = "silu"  # of the feed-forward block: silu or gelu_pytorch_tanh
    embed_scale: float = 1.0  # input embeddings are multiplied by it
    query_scale: float = 1.0  # queries are multiplied by it, besides the 1 / sqrt(head_dim) of every attention
    logit_cap: float | None = None  # logits x become cap * tanh(x / cap)
    # of each layer the tokens, itself included, that a token attends to, None: all before it; (): all, in every layer
    windows: tuple[int | None, ...] = ()
    window_rope: Rope | None = None  # of the layers that have a window; None: as in the others

    @cached_property
    def ropes(self) -> tuple["ModelSpec | Rope", ...]:
        """The different rotary embeddings of the model, for `rope.inverse_frequencies`."""
        return (self,) if self.window_rope is None else (self, self.window_rope)

    @cached_property
    def rope_of_layer(self) -> tuple[int, ...]:
        """Index into `ropes` of each layer."""
        if self.window_rope is None:
            return (0,) * self.num_layers
        return tuple(int(window is not None) for window in self.windows)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """The layers that have a sliding window."""
        return tuple(layer for layer, window in enumerate(self.windows) if window is not None)

    @cached_property
    def full(self) -> tuple[int, ...]:
        """The layers that attend to everything, which are those that EPS reads sparsely."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.windowed)

    def require_full_attention(self, what: str) -> None:
        """Raises ConfigError where a layer has a sliding window, which `what` cannot serve."""
        require(
            not self.windowed,
            f"{what} needs full attention in every layer, and {len(self.windowed)} of the {self.num_layers} layers of "
            f"this {self.family} have a sliding window: leave it out",
        )

    @property
    def context_note(self) -> str:
        """Return the end of a refusal of a longer context, where the model promises one that EPS does not compute."""
        if self.rope_scaling is None or self.rope_scaling["rope_type"] != "dynamic":
            return ""
        return " (its dynamic RoPE scaling beyond that would turn every cached key again, which EPS does not do)"

    @property
    def notes(self) -> list[str]:
        """One line each for what a run of the model should know before it starts."""
        found = []
        if self.windowed:
            tokens = ", ".join(str(size) for size in sorted({size for size in self.windows if size is not None}))
            found.append(
                f"{len(self.windowed)} of {self.num_layers} layers have a sliding window of {tokens} tokens: they read "
                f"it densely, EPS the other {len(self.full)}"
            )
        if (self.rope_scaling or {}).get("switches_at"):
            found.append(
                "RoPE takes its long factors at every length, as mlx-lm and vLLM do; transformers takes the short ones "
                f"up to {self.rope_scaling['switches_at']:,.0f} tokens"  # type: ignore[index]
            )
        return found
