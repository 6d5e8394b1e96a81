"""The oracle's arithmetic for whole models, in float64. Slow on purpose, never optimised."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from eps_core.config.cache import DTYPE_BYTES
from eps_core.decode.quantised_weights import HEAD, quantised_layers
from eps_core.errors import ConfigError
from eps_core.models.rope import attention_factor, inverse_frequencies
from eps_core.models.spec import ModelSpec
from eps_core.models.weights import load_weights
from eps_core.reference.cache import from_numpy
from eps_core.reference.quantised_weights import affine, symmetric


class Model:
    """See `decode.forward.Arithmetic`. `dtype` is what the weights are rounded to before they are used; what attention
    reads is what lies in the cache, in the cache's dtype."""

    def __init__(self, spec: ModelSpec, weights: dict[str, np.ndarray], dtype: str = "float32") -> None:
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPE_BYTES)}")
        self.spec, self.dtype, self.device = spec, dtype, "cpu"
        self.weights = {name: from_numpy(w, dtype).astype(np.float64) for name, w in weights.items()}
        self.group_sizes: dict[str, int] = {}  # of the weights that hold what `bits` do
        self.bits, self.full = 0, self
        self.ropes = [(inverse_frequencies(rope), attention_factor(rope)) for rope in spec.ropes]
        self.embed_scale = from_numpy(np.array(spec.embed_scale), dtype).astype(np.float64)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes that a backend reads: float64 stands here for `dtype`, and for codes, steps and offsets."""

        def stored(name: str) -> int:
            size, number_bytes = self.weights[name].size, DTYPE_BYTES[self.dtype]
            if name not in self.group_sizes:
                return size * number_bytes
            numbers = 1 if self.bits == 8 else 2  # a step, an offset
            return size * self.bits // 8 + size // self.group_sizes[name] * numbers * number_bytes

        return sum(stored(name) for name in self.weights if name != "embed" or self._head == "embed")

    def quantised(self, bits: int) -> "Model":
        small = copy.copy(self.full)
        small.group_sizes, small.bits = quantised_layers(self.spec, bits), bits
        small.weights = dict(small.weights)
        for name, group_size in small.group_sizes.items():
            weight = self.full.weights[self.full._head if name == HEAD else name]
            if bits == 8:
                codes, steps = symmetric(weight)
                small.weights[name] = from_numpy(steps, self.dtype).astype(np.float64) * codes
                continue
            codes, *affinities = affine(weight, group_size)
            steps, offsets = (from_numpy(one, self.dtype).astype(np.float64) for one in affinities)
            small.weights[name] = (steps * codes + offsets).reshape(weight.shape)
        return small

    def multiply_rows(self, name: str, factors: np.ndarray) -> None:
        self.weights[name] = (self.weights[name].T * factors).T

    @contextmanager
    def scope(self) -> Iterator[None]:
        yield

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        return self.embed_scale * self.weights["embed"][tokens]

    def rotation(self, positions: np.ndarray) -> list[np.ndarray]:
        """Angles [N, D/2] in radians, of each of `ModelSpec.ropes`."""
        return [positions[:, None] * frequencies for frequencies, _ in self.ropes]

    def project(self, layer: int, x: np.ndarray, turn: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        spec, prefix = self.spec, f"layers.{layer}."
        h = self._norm(prefix + "input_norm", x)
        q = self._linear(prefix + "q", h).reshape(len(x), spec.num_heads, spec.head_dim)
        k = self._linear(prefix + "k", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        v = self._linear(prefix + "v", h).reshape(len(x), spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._norm(prefix + "q_norm", q), self._norm(prefix + "k_norm", k)
        rope = spec.rope_of_layer[layer]
        factor = self.ropes[rope][1]
        return factor * rotate(q, turn[rope]), factor * rotate(k, turn[rope]), v

    def after_attention(self, layer: int, x: np.ndarray, out: np.ndarray) -> np.ndarray:
        prefix = f"layers.{layer}."
        y = self._linear(prefix + "o", out.reshape(len(x), -1))
        x = x + self._output_norm(prefix + "attention_norm", y)
        h = self._norm(prefix + "post_norm", x)
        gate = ACTIVATIONS[self.spec.activation](self._linear(prefix + "gate", h))
        y = self._linear(prefix + "down", gate * self._linear(prefix + "up", h))
        return x + self._output_norm(prefix + "feed_forward_norm", y)

    def for_rows(self, kernels: str, rows: int) -> "Model":
        return self

    def logits(self, x: np.ndarray) -> np.ndarray:
        y, cap = self._linear(self._head, self._norm("norm", x)), self.spec.logit_cap
        return (y if cap is None else cap * np.tanh(y / cap)).astype(np.float32)

    def whole_step(self, *step: Any) -> None:
        return None

    @property
    def _head(self) -> str:
        return HEAD if HEAD in self.weights else "embed"

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = x @ self.weights[name].T
        bias = self.weights.get(f"{name}_bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """RMSNorm over the last axis."""
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.spec.norm_eps) * self.weights[name]

    def _output_norm(self, name: str, y: np.ndarray) -> np.ndarray:
        return self._norm(name, y) if self.spec.output_norms else y


def _silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x), without its overflow."""
    return x * 0.5 * (1.0 + np.tanh(x / 2))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    """GELU with tanh in place of the error function (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return x * 0.5 * (1.0 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"silu": _silu, "gelu_pytorch_tanh": _gelu_tanh}


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """RoPE in Hugging Face's half-rotation form: x [N, H, D], angles [N, D/2] in radians. Dimensions i and i + D/2
    are a pair."""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def load_model(path: Path, spec: ModelSpec, dtype: str = "float32", device: str = "cpu") -> Model:
    """The oracle's part of a Hugging Face directory."""
    return Model(spec, load_weights(path, spec), dtype)
