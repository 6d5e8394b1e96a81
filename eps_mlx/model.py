"""The model families of `models.registry` in MLX operations: the arithmetic of `decode.forward`.

Pending state is evaluated once per chunk or step, together with the logits: that is the only synchronisation of a step
whose selection has host-known numbers.
"""

import copy
import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from eps_core.decode.draft_weights import HEAD, quantised_layers
from eps_core.errors import ConfigError
from eps_core.models.rope import attention_factor, cos_sin, inverse_frequencies
from eps_core.models.spec import ModelSpec
from eps_core.models.weights import load_weights
from eps_mlx.device import DTYPES, device_of, devices, from_numpy
from eps_mlx.draft_weights import Packed, pack


class Model:
    """See `decode.forward.Arithmetic`. Weights and activations are in `dtype`; norms, rotation, attention logits and
    the returned logits are float32. The cache's dtype may differ."""

    def __init__(self, spec: ModelSpec, weights: dict[str, mx.array], dtype: str, device: str) -> None:
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

    def quantised(self) -> "Model":
        if self.packed:
            return self
        drafts = copy.copy(self)
        drafts.weights, drafts.packed = dict(self.weights), {}
        for name, group_size in quantised_layers(self.spec).items():
            with self.scope():
                drafts.packed[name] = pack(drafts.weights.pop(name, self.weights["embed"]), group_size, self.device)
        return drafts

    def scope(self) -> AbstractContextManager[Any]:
        return mx.stream(device_of(self.device))

    def embed(self, tokens: np.ndarray) -> mx.array:
        return self.weights["embed"][mx.array(np.asarray(tokens).astype(np.int32))] * self.embed_scale

    def rotation(self, positions: np.ndarray) -> list[tuple[mx.array, mx.array]]:
        """cos and sin [N, 1, D/2] float32 of every position's angles, times `rope.attention_factor`, of each of
        `ModelSpec.ropes`."""
        angles = (cos_sin(frequencies, positions, factor) for frequencies, factor in self.ropes)
        return [(mx.array(cos), mx.array(sin)) for cos, sin in angles]

    def project(
        self, layer: int, x: mx.array, turn: list[tuple[mx.array, mx.array]]
    ) -> tuple[mx.array, mx.array, mx.array]:
        spec, prefix = self.spec, f"layers.{layer}."
        h = self._norm(prefix + "input_norm", x)
        q = self._linear(prefix + "q", h).reshape(len(x), spec.num_heads, spec.head_dim)
        k = self._linear(prefix + "k", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        v = self._linear(prefix + "v", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._norm(prefix + "q_norm", q), self._norm(prefix + "k_norm", k)
        own = turn[spec.rope_of_layer[layer]]
        return rotate(q, *own), rotate(k, *own), v

    def add_attention(self, layer: int, x: mx.array, out: mx.array) -> mx.array:
        y = self._linear(f"layers.{layer}.o", out.reshape(len(x), -1))
        return x + self._output_norm(f"layers.{layer}.attention_norm", y)

    def feed_forward(self, layer: int, x: mx.array) -> mx.array:
        prefix = f"layers.{layer}."
        h = self._norm(prefix + "post_norm", x)
        gate = ACTIVATIONS[self.spec.activation](self._linear(prefix + "gate", h))
        y = self._linear(prefix + "down", gate * self._linear(prefix + "up", h))
        return x + self._output_norm(prefix + "feed_forward_norm", y)

    def logits(self, x: mx.array) -> mx.array:
        y, cap = self._linear(self._head, self._norm("norm", x)).astype(mx.float32), self.spec.logit_cap
        return y if cap is None else cap * mx.tanh(y / cap)

    def whole_step(self, *step: Any) -> None:
        return None

    @property
    def _head(self) -> str:
        return HEAD if HEAD in self.weights or HEAD in self.packed else "embed"

    def _linear(self, name: str, x: mx.array) -> mx.array:
        bias = self.weights.get(f"{name}_bias")
        if name in self.packed:
            return self.packed[name](x, bias)
        y = x @ self.weights[name].T
        return y if bias is None else y + bias

    def _norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weights[name], self.spec.norm_eps)

    def _output_norm(self, name: str, y: mx.array) -> mx.array:
        return self._norm(name, y) if self.spec.output_norms else y


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _gelu_tanh(x: mx.array) -> mx.array:
    """GELU with tanh in place of the error function (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return x * 0.5 * (1.0 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"silu": _silu, "gelu_pytorch_tanh": _gelu_tanh}


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """RoPE in Hugging Face's half-rotation form, in float32: x [N, H, D], cos, sin [N, 1, D/2]. Dimensions i and
    i + D/2 are a pair."""
    first, second = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def load_model(path: Path, spec: ModelSpec, dtype: str = "float32", device: str = "auto") -> Model:
    """Load the model of a Hugging Face directory. Raises ConfigError for an absent device or an unknown dtype before
    any weight is read."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    device_of(device)
    device = devices()[-1] if device == "auto" else device
    weights = {}
    for name, array in load_weights(path, spec).items():
        weights[name] = from_numpy(array, dtype, device)
        mx.eval(weights[name])
    return Model(spec, weights, dtype, device)
