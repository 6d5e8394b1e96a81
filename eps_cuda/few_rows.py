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
from eps_core.cpu.calls import Call, lanes
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
        self._before, self._after = [], []
        for number in range(spec.num_layers):
            prefix = f"layers.{number}."
            own_norms = tuple(self._norm(prefix + name, spec.qk_norm) for name in ("q_norm", "k_norm"))
            products = self._weights([prefix + name for name in "qkv"])
            self._before.append((self._norm(prefix + "input_norm"), products, own_norms))
            norms = (
                self._norm(prefix + "attention_norm", spec.output_norms), self._norm(prefix + "post_norm"),
                self._norm(prefix + "feed_forward_norm", spec.output_norms),
            )  # fmt: skip
            self._after.append((norms, self._weights([prefix + name for name in ("o", "gate", "up", "down")])))
        head = self._weights([model.head])
        self._head = self._norm("norm"), *(one for (one,) in head)

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
        outs = self.projected(len(x))
        self._run(self.before(layer, x, turn, outs))
        q, k, v = map(torch.from_numpy, outs)
        if layer in self.spec.windowed:  # array operations attend there, in the dtype of q
            q = q.to(self.model.weights["embed"].dtype)
        return q, k, v

    def after_attention(self, layer: int, x: np.ndarray, attended: Tensor) -> np.ndarray:
        out = np.empty(x.shape, np.float32)
        self._run(self.after(layer, x, kernels.host(attended.float()), out, self.room(len(x))))
        return out

    def logits(self, x: np.ndarray) -> Tensor:
        out = np.empty((len(x), self.spec.vocab_size), np.float32)
        self._run(self.head(x, out))
        return self.model.capped(torch.from_numpy(out))

    def projected(self, rows: int) -> tuple[np.ndarray, ...]:
        """Return arrays for q, k and v of so many rows."""
        spec = self.spec
        num_heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        return tuple(np.empty((rows, number, spec.head_dim), np.float32) for number in num_heads)

    def before(self, layer: int, x: np.ndarray, turn: Turn, outs: tuple[np.ndarray, ...]) -> Call:
        """Return the call that fills outs, as of `projected`, from x [R, hidden]."""
        norm, products, own_norms = self._before[layer]
        args = x, norm, self.epsilon, *products, own_norms, *turn[self.spec.rope_of_layer[layer]], outs
        return Call(calls.before_attention, calls.AROUND, args)

    def room(self, rows: int) -> list[np.ndarray]:
        """Return the arrays in which `after` works on so many rows."""
        sizes = self.spec.hidden_size, self.spec.intermediate_size, self.spec.hidden_size
        return [np.empty((rows, size), np.float32) for size in sizes]

    def after(
        self, layer: int, x: np.ndarray, attended: np.ndarray, out: np.ndarray, room: Sequence[np.ndarray]
    ) -> Call:
        """Return the call that fills out [R, hidden] from x [R, hidden] and attended [R, Hq, D]."""
        norms, products = self._after[layer]
        is_gelu, rows = self.spec.activation != "silu", attended.reshape(len(x), -1)
        return Call(calls.after_attention, calls.AFTER, (x, rows, norms, self.epsilon, *products, is_gelu, *room, out))

    def head(self, x: np.ndarray, out: np.ndarray) -> Call:
        """Return the call that fills out [R, V] from x [R, hidden]."""
        norm, weight, steps, bias = self._head
        return Call(calls.head, calls.AROUND, (x, norm, self.epsilon, weight, steps, bias, out))

    @staticmethod
    def _run(call: Call) -> None:
        kernels.run(call.kernel, call.phases, *call.args)
