"""The model families of `models.registry` in MLX operations.

Pending state is evaluated once per chunk or step, together with the logits: that is the only synchronisation of a step
whose selection has host-known numbers.
"""

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from eps_core.decode.array_model import ArrayModel
from eps_core.errors import ConfigError
from eps_core.models.spec import ModelSpec
from eps_core.models.weights import load_weights
from eps_mlx.device import DTYPES, device_of, devices, from_numpy
from eps_mlx.ops import OPS
from eps_mlx.quantised_weights import Packed, pack_groups, pack_rows


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _gelu_tanh(x: mx.array) -> mx.array:
    """GELU with tanh in place of the error function (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return x * 0.5 * (1.0 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"silu": _silu, "gelu_pytorch_tanh": _gelu_tanh}


class Model(ArrayModel):
    ops, activations = OPS, ACTIVATIONS

    def pack(self, weight: mx.array, group_size: int, bits: int) -> Packed:
        with self.scope():
            return pack_rows(weight, self.device) if bits == 8 else pack_groups(weight, group_size, self.device)

    def multiply_rows(self, name: str, factors: np.ndarray) -> None:
        weight = self.weights[name]
        with self.scope():
            column = mx.array(factors).astype(weight.dtype).reshape(-1, *[1] * (weight.ndim - 1))
            self.weights[name] = weight * column
            mx.eval(self.weights[name])

    def scope(self) -> AbstractContextManager[Any]:
        return mx.stream(device_of(self.device))

    def embed(self, tokens: np.ndarray) -> mx.array:
        return self.weights["embed"][mx.array(np.asarray(tokens).astype(np.int32))] * self.embed_scale

    def norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weights[name], self.spec.norm_eps)

    def linear(self, x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        y = x @ weight.T
        return y if bias is None else y + bias

    def whole_step(self, *step: Any) -> None:
        return None


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
