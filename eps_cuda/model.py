"""The model families of `models.registry` in Torch operations."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eps_core.attention.stats import StepOutput
from eps_core.decode.array_model import ArrayModel
from eps_core.errors import ConfigError
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.models.spec import ModelSpec
from eps_core.models.weights import load_weights
from eps_cuda.cache import Cache
from eps_cuda.device import DTYPES, device_of, from_numpy
from eps_cuda.ops import OPS, multiplies
from eps_cuda.quantised_weights import pack_groups, pack_rows

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


CACHE_LINE = 64  # bytes
WIDE_ROWS = 10  # rows from which on casting the weight to a dtype that the device multiplies takes less time
TOGETHER = ("q", "k", "v"), ("gate", "up")  # weights of a layer that multiply the same rows


class Joined(NamedTuple):
    """Weights that lie one behind the other: weight [sum of N, K], bias [sum of N], the N of each."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]


class Model(ArrayModel):
    ops, activations = OPS, ACTIVATIONS

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], dtype: str, device: str) -> None:
        super().__init__(spec, weights, dtype, device)
        self.joined: dict[str, Joined] = {}
        self._few_rows: Any = None  # `few_rows.FewRows` of it, or itself where there is none
        if device == "cpu":
            self._place_weights()

    def _place_weights(self) -> None:
        """Put weights that are read together behind each other, and every one at a cache line: as they lie in a file,
        a decode step reads them a third slower, and a call of a small product costs as much as the product."""
        parts: set[str] = set()
        for layer in range(self.spec.num_layers):
            for names in ([f"layers.{layer}.{name}" for name in together] for together in TOGETHER):
                weight = torch.cat([self.weights[name] for name in names])
                biases = [self.weights[f"{name}_bias"] for name in names if f"{name}_bias" in self.weights]
                sizes, bias = [len(self.weights[name]) for name in names], torch.cat(biases) if biases else None
                self.joined[names[0]] = Joined(weight, bias, sizes)
                split = dict(zip(names, weight.split(sizes), strict=True))
                if bias is not None:
                    split |= zip([f"{name}_bias" for name in names], bias.split(sizes), strict=True)
                self.weights |= split
                parts |= split.keys()
        for name, weight in self.weights.items():
            if name not in parts and weight.data_ptr() % CACHE_LINE:
                self.weights[name] = weight.clone()

    @torch.inference_mode()
    def multiply_rows(self, name: str, factors: np.ndarray) -> None:
        weight = self.weights[name]  # where it is `joined`, a part of it
        weight.mul_(torch.from_numpy(factors).to(weight).view(-1, *[1] * (weight.ndim - 1)))

    @torch.inference_mode()
    def quantised(self, bits: int) -> Self:
        if self.device != "cpu":
            raise ConfigError(
                f"{bits}-bit weights need the CPU in Torch, and the model is on {self.device}: use full weights"
            )
        small = super().quantised(bits)
        small._few_rows = None
        return small

    def pack(self, weight: Tensor, group_size: int, bits: int) -> Callable[[Tensor, Tensor | None], Tensor]:
        return pack_rows(weight) if bits == 8 else pack_groups(weight, group_size)

    def scope(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def embed(self, tokens: np.ndarray) -> Tensor:
        return self.embedded(torch.from_numpy(np.asarray(tokens, np.int64)).to(self.device, non_blocking=True))

    def embedded(self, tokens: Tensor) -> Tensor:
        """`embed` of tokens [N] int64 that lie on the device."""
        embedded: Tensor = self.weights["embed"][tokens] * self.embed_scale
        return embedded

    def norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[name], self.spec.norm_eps)

    def linears(self, names: Sequence[str], x: Tensor) -> Sequence[Tensor]:
        joined = self.joined.get(names[0])
        if joined is None or names[0] in self.packed:
            return super().linears(names, x)
        return self.linear(x, joined.weight, joined.bias).split(joined.sizes, dim=-1)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) == 1 and x.dtype == torch.bfloat16 and self.device == "cpu" and torch.cpu._is_amx_tile_supported():
            # with AMX, Torch's product of matrices takes a single row at half of the memory's speed; without, it is
            # 1.3 to 1.8 times as fast as the product with a vector
            y = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
            return y[None]
        if len(x) >= WIDE_ROWS and not multiplies(x):
            wide = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
            return wide.to(x.dtype)
        return functional.linear(x, weight, bias)

    def for_rows(self, kernels: str, rows: int) -> Any:
        if kernels != "numba" or self.device != "cpu":
            return self
        from eps_cuda import few_rows  # imports numba, which only these kernels need

        if rows > few_rows.MOST_ROWS:
            return self
        if self._few_rows is None:
            self._few_rows = few_rows.FewRows.of(self) or self
        return self._few_rows

    def whole_step(
        self,
        cache: Cache,
        tokens: np.ndarray,
        slots: np.ndarray,
        plan: StepPlan,
        sparse: bool,
        draft: bool,
        timed: bool,
    ) -> tuple[Cache, StepOutput] | None:
        if self.spec.windowed or (draft and not sparse):
            return None
        if cache.kernels == "triton":
            if timed:
                return None
            from eps_cuda import graph  # imports Triton, which only these kernels need

            if sparse:
                return graph.step(self, cache, tokens, slots, plan, draft)
            return graph.dense_step(self, cache, tokens, slots, plan)
        few = self.for_rows(cache.kernels, len(tokens))
        if few is self:
            return None
        from eps_cuda import cpu_step  # imports numba, as the calls of few rows do

        return cpu_step.step(few, cache, tokens, slots, plan, sparse, draft, timed)


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
