"""A model's layers for few rows on a CPU, by the compiled calls of `eps_core.cpu.layer`: of decode steps and verify
passes.

Activations are numpy float32 between the calls, whatever the weights are; only what attention is given and gives is
Torch's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from eps_core.cpu import layer as calls
from eps_core.cpu.calls import lanes
from eps_core.cpu.vectors import LANES
from eps_core.models.spec import ModelSpec
from eps_cuda.kernels.cpu import kernels
from eps_cuda.quantised_weights import Rows

MOST_ROWS = 32  # of more, Torch's product of matrices takes less time
_NONE = np.empty(0, np.float32)
Turn = list[tuple[np.ndarray, np.ndarray]]


class Weights(NamedTuple):
    """Some linear layers: weights flat, steps of 8-bit codes and biases float32, empty where there are none."""

    weights: tuple[np.ndarray, ...]
    steps: tuple[np.ndarray, ...]
    biases: tuple[np.ndarray, ...]


class FewRows:
    """See `decode.forward.Arithmetic`: what a pass of at most MOST_ROWS rows calls of it."""

    def __init__(self, model: Any) -> None:
        self.model, self.spec, self.ops = model, model.spec, model.ops
        self.epsilon = np.float32(self.spec.norm_eps)
        spec = self.spec
        self.num_heads = np.array([spec.num_heads, spec.num_kv_heads])
        self.before, self.after = [], []
        for number in range(spec.num_layers):
            prefix = f"layers.{number}."
            own_norms = tuple(self._norm(prefix + name, spec.qk_norm) for name in ("q_norm", "k_norm"))
            products = self._weights([prefix + name for name in "qkv"])
            self.before.append((self._norm(prefix + "input_norm"), products, own_norms))
            norms = (
                self._norm(prefix + "attention_norm", spec.output_norms), self._norm(prefix + "post_norm"),
                self._norm(prefix + "feed_forward_norm", spec.output_norms),
            )  # fmt: skip
            self.after.append((norms, self._weights([prefix + name for name in ("o", "gate", "up", "down")])))
        head = self._weights([model.head])
        self.head = self._norm("norm"), *(one for (one,) in head)

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """The calls of a model, None where they do not support its shape or its weights."""
        spec: ModelSpec = model.spec
        inner = (spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim)
        whole = not any(size % LANES for size in (*inner, spec.head_dim)) and spec.vocab_size >= LANES
        return cls(model) if whole and all(type(one) is Rows for one in model.packed.values()) else None

    def _norm(self, name: str, exists: bool = True) -> np.ndarray:
        return self.model.weights[name].float().numpy() if exists else _NONE

    def _weights(self, names: Sequence[str]) -> Weights:
        codes, steps, biases = [], [], []
        for name in names:
            packed: Rows | None = self.model.packed.get(name)
            weight = self.model.weights[name] if packed is None else packed.codes
            codes.append(lanes(kernels.host(weight)))
            steps.append(_NONE if packed is None else packed.steps.float().numpy())
            bias = self.model.weights.get(f"{name}_bias")
            biases.append(_NONE if bias is None else bias.float().numpy())
        return Weights(tuple(codes), tuple(steps), tuple(biases))

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        embedded: np.ndarray = self.model.embed(tokens).float().numpy()
        return embedded

    def rotation(self, positions: np.ndarray) -> Turn:
        return [(cos[:, 0], sin[:, 0]) for cos, sin in self.model.angles(positions)]

    def project(self, layer: int, x: np.ndarray, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        spec, (norm, products, own_norms) = self.spec, self.before[layer]
        out = np.empty((len(x), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim), np.float32)
        kernels.run(
            calls.before_attention, calls.AROUND, x, norm, self.epsilon, *products, self.num_heads, own_norms,
            *turn[spec.rope_of_layer[layer]], out,
        )  # fmt: skip
        q, k, v = torch.from_numpy(out).split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer in spec.windowed:  # array operations attend there, in the dtype of q
            q = q.to(self.model.weights["embed"].dtype)
        return q, k, v

    def after_attention(self, layer: int, x: np.ndarray, attended: Tensor) -> np.ndarray:
        spec, (norms, products) = self.spec, self.after[layer]
        attended_rows = kernels.host(attended.float()).reshape(len(x), -1)
        added, again, out = (np.empty(x.shape, np.float32) for _ in range(3))
        middle = np.empty((len(x), spec.intermediate_size), np.float32)
        kernels.run(
            calls.after_attention, calls.AFTER, x, attended_rows, norms, self.epsilon, *products,
            spec.activation != "silu", added, middle, again, out,
        )  # fmt: skip
        return out

    def logits(self, x: np.ndarray) -> Tensor:
        norm, weight, steps, bias = self.head
        out = np.empty((len(x), self.spec.vocab_size), np.float32)
        kernels.run(calls.head, calls.AROUND, x, norm, self.epsilon, weight, steps, bias, out)
        return self.model.capped(torch.from_numpy(out))
