"""The model families of `models.registry` over arrays of either library: the arithmetic of `decode.forward`."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops
from eps_core.decode.quantised_weights import HEAD, quantised_layers
from eps_core.models.rope import attention_factor, cos_sin, inverse_frequencies
from eps_core.models.spec import ModelSpec


class ArrayModel:
    """See `decode.forward.Arithmetic`. Weights and activations are in `dtype` (activations of `for_rows` in float32);
    norms, rotation, attention logits and the returned logits are float32. The cache's dtype may differ. A backend fills
    in `ops`, `activations`, `scope`, `embed`, `whole_step`, and what raises NotImplementedError here."""

    ops: ClassVar[Ops]
    activations: ClassVar[Mapping[str, Callable[[Any], Any]]]
    _full: Self | None = None

    def __init__(self, spec: ModelSpec, weights: dict[str, Array], dtype: str, device: str) -> None:
        self.spec, self.weights, self.dtype, self.device = spec, weights, dtype, device
        self.packed: dict[str, Any] = {}  # layers with quantised weights
        self.ropes = [(inverse_frequencies(rope), attention_factor(rope)) for rope in spec.ropes]
        scale = self.ops.on(self, np.array(spec.embed_scale, np.float32))
        self.embed_scale = self.ops.cast(scale, weights["embed"].dtype)

    def norm(self, name: str, x: Array) -> Array:
        """Return the RMS norm of x [.., D]."""
        raise NotImplementedError

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        raise NotImplementedError

    def pack(self, weight: Array, group_size: int, bits: int) -> Any:
        """Return quantised weights that are called with (x, bias)."""
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        read = {name: weight.nbytes for name, weight in self.weights.items() if name != "embed" or self.head == "embed"}
        return sum(read.values()) + sum(packed.nbytes for packed in self.packed.values())

    @property
    def full(self) -> Self:
        return self if self._full is None else self._full

    def quantised(self, bits: int) -> Self:
        small = copy.copy(self.full)
        small._full, small.weights, small.packed = self.full, dict(small.weights), {}
        for name, group_size in quantised_layers(self.spec, bits).items():
            weight = small.weights.pop(name, small.weights["embed"])
            small.packed[name] = self.pack(weight, group_size, bits)
        return small

    def angles(self, positions: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return cos and sin [N, 1, D] float32 of `rotate` at every position, times `rope.attention_factor`, of each of
        `ModelSpec.ropes`."""
        pairs = (cos_sin(frequencies, positions, factor) for frequencies, factor in self.ropes)
        return [(np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1)) for cos, sin in pairs]

    def rotation(self, positions: np.ndarray) -> list[tuple[Array, Array]]:
        return [(self.ops.on(self, cos), self.ops.on(self, sin)) for cos, sin in self.angles(positions)]

    def project(self, layer: int, x: Array, turn: list[tuple[Array, Array]]) -> tuple[Array, Array, Array]:
        spec, prefix = self.spec, f"layers.{layer}."
        h = self.norm(prefix + "input_norm", x)
        products = self.linears([prefix + name for name in "qkv"], h)
        q, k, v = (product.reshape(len(x), -1, spec.head_dim) for product in products)
        if spec.qk_norm:
            q, k = self.norm(prefix + "q_norm", q), self.norm(prefix + "k_norm", k)
        both = rotate(self.ops, self.ops.concatenate([q, k], axis=1), *turn[spec.rope_of_layer[layer]])
        return both[:, : spec.num_heads], both[:, spec.num_heads :], v

    def after_attention(self, layer: int, x: Array, out: Array) -> Array:
        prefix = f"layers.{layer}."
        y = self._linear(prefix + "o", out.reshape(len(x), -1))
        x = x + self._output_norm(prefix + "attention_norm", y)
        h = self.norm(prefix + "post_norm", x)
        gate, up = self.linears([prefix + "gate", prefix + "up"], h)
        y = self._linear(prefix + "down", self.activations[self.spec.activation](gate) * up)
        return x + self._output_norm(prefix + "feed_forward_norm", y)

    def logits(self, x: Array) -> Array:
        return self.capped(self.ops.float32(self._linear(self.head, self.norm("norm", x))))

    def capped(self, logits: Array) -> Array:
        """Return logits [N, V] float32 as `ModelSpec.logit_cap` says."""
        cap = self.spec.logit_cap
        return logits if cap is None else cap * self.ops.tanh(logits / cap)

    def for_rows(self, kernels: str, rows: int) -> Any:
        return self

    @property
    def head(self) -> str:
        return HEAD if HEAD in self.weights or HEAD in self.packed else "embed"

    def linears(self, names: Sequence[str], x: Array) -> Sequence[Array]:
        """Return the products of x [N, K] with several weights."""
        return [self._linear(name, x) for name in names]

    def _linear(self, name: str, x: Array) -> Array:
        bias = self.weights.get(f"{name}_bias")
        if name in self.packed:
            return self.packed[name](x, bias)
        return self.linear(x, self.weights[name], bias)

    def _output_norm(self, name: str, y: Array) -> Array:
        return self.norm(name, y) if self.spec.output_norms else y


def rotate(ops: Ops, x: Array, cos: Array, sin: Array) -> Array:
    """RoPE in Hugging Face's half-rotation form, in float32: x [N, H, D]; cos [N, 1, D] of the angle of dimension i and
    of i + D/2, a pair; sin [N, 1, D] of it, negated for the first."""
    wide, half = ops.float32(x), x.shape[-1] // 2
    swapped = ops.concatenate([wide[..., half:], wide[..., :half]], axis=-1)
    return ops.cast(wide * cos + swapped * sin, x.dtype)
