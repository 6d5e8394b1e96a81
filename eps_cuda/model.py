"""The model families of `models.registry` in Torch operations: the arithmetic of `decode.forward`."""

import copy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eps_core.attention.stats import StepOutput
from eps_core.decode.draft_weights import FLAG, HEAD, quantised_layers
from eps_core.errors import ConfigError
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.models.rope import attention_factor, cos_sin, inverse_frequencies
from eps_core.models.spec import ModelSpec
from eps_core.models.weights import load_weights
from eps_cuda.cache import Cache
from eps_cuda.device import DTYPES, device_of, from_numpy
from eps_cuda.draft_weights import Packed, pack

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


class Model:
    """See `decode.forward.Arithmetic`. Weights and activations are in `dtype`; norms, rotation, attention logits and
    the returned logits are float32. The cache's dtype may differ."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], dtype: str, device: str) -> None:
        self.spec, self.weights, self.dtype, self.device = spec, weights, dtype, device
        self.packed: dict[str, Packed] = {}  # layers with 4-bit weights
        self.ropes = [(inverse_frequencies(rope), attention_factor(rope)) for rope in spec.ropes]
        self.embed_scale = from_numpy(np.array(spec.embed_scale, np.float32), dtype, device)

    @property
    def weight_bytes(self) -> int:
        read = {
            name: weight.nbytes for name, weight in self.weights.items() if name != "embed" or self._head == "embed"
        }
        return sum(read.values()) + sum(packed.nbytes for packed in self.packed.values())

    @torch.inference_mode()
    def quantised(self) -> "Model":
        if self.packed:
            return self
        if self.device != "cpu":
            raise ConfigError(
                f"4-bit draft weights need the CPU in Torch, and the model is on {self.device}: add {FLAG}"
            )
        drafts = copy.copy(self)
        drafts.weights, drafts.packed = dict(self.weights), {}
        for name, group_size in quantised_layers(self.spec).items():
            drafts.packed[name] = pack(drafts.weights.pop(name, self.weights["embed"]), group_size)
        return drafts

    def scope(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def embed(self, tokens: np.ndarray) -> Tensor:
        return self.embedded(torch.from_numpy(np.asarray(tokens, np.int64)).to(self.device))

    def embedded(self, tokens: Tensor) -> Tensor:
        """`embed` of tokens [N] int64 that lie on the device."""
        return self.weights["embed"][tokens] * self.embed_scale

    def angles(self, positions: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """cos and sin [N, 1, D/2] float32 of every position's angles, times `rope.attention_factor`, of each of
        `ModelSpec.ropes`."""
        return [cos_sin(frequencies, positions, factor) for frequencies, factor in self.ropes]

    def rotation(self, positions: np.ndarray) -> list[tuple[Tensor, Tensor]]:
        return [
            (torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device))
            for cos, sin in self.angles(positions)
        ]

    def project(self, layer: int, x: Tensor, turn: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        spec, prefix = self.spec, f"layers.{layer}."
        h = self._norm(prefix + "input_norm", x)
        q = self._linear(prefix + "q", h).reshape(len(x), spec.num_heads, spec.head_dim)
        k = self._linear(prefix + "k", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        v = self._linear(prefix + "v", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._norm(prefix + "q_norm", q), self._norm(prefix + "k_norm", k)
        own = turn[spec.rope_of_layer[layer]]
        return rotate(q, *own), rotate(k, *own), v

    def add_attention(self, layer: int, x: Tensor, out: Tensor) -> Tensor:
        y = self._linear(f"layers.{layer}.o", out.reshape(len(x), -1))
        return x + self._output_norm(f"layers.{layer}.attention_norm", y)

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        prefix = f"layers.{layer}."
        h = self._norm(prefix + "post_norm", x)
        gate = ACTIVATIONS[self.spec.activation](self._linear(prefix + "gate", h))
        y = self._linear(prefix + "down", gate * self._linear(prefix + "up", h))
        return x + self._output_norm(prefix + "feed_forward_norm", y)

    def logits(self, x: Tensor) -> Tensor:
        y, cap = self._linear(self._head, self._norm("norm", x)).float(), self.spec.logit_cap
        return y if cap is None else cap * torch.tanh(y / cap)

    def whole_step(
        self, cache: Cache, tokens: np.ndarray, slots: np.ndarray, plan: StepPlan, sparse: bool, draft: bool
    ) -> tuple[Cache, StepOutput] | None:
        if cache.kernels != "triton" or (draft and not sparse) or self.spec.windowed:
            return None
        from eps_cuda import graph  # imports Triton, which only these kernels need

        return (
            graph.step(self, cache, tokens, slots, plan, draft)
            if sparse
            else graph.dense_step(self, cache, tokens, slots, plan)
        )

    @property
    def _head(self) -> str:
        return HEAD if HEAD in self.weights or HEAD in self.packed else "embed"

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.weights.get(f"{name}_bias")
        if name in self.packed:
            return self.packed[name](x, bias)
        return functional.linear(x, self.weights[name], bias)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[name], self.spec.norm_eps)

    def _output_norm(self, name: str, y: Tensor) -> Tensor:
        return self._norm(name, y) if self.spec.output_norms else y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in Hugging Face's half-rotation form, in float32: x [N, H, D], cos, sin [N, 1, D/2]. Dimensions i and
    i + D/2 are a pair."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@torch.inference_mode()
def load_model(path: Path, spec: ModelSpec, dtype: str = "float32", device: str = "auto") -> Model:
    """Load the model of a Hugging Face directory. Raises ConfigError for an absent device or an unknown dtype before
    any weight is read."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    place = device_of(device).type
    if place == "cuda" and spec.windowed:
        print("CUDA graphs do not take sliding windows: steps run layer by layer", file=sys.stderr)
    weights = {name: from_numpy(array, dtype, place) for name, array in load_weights(path, spec).items()}
    return Model(spec, weights, dtype, place)
