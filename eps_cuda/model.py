"""The model families of `models.registry` in Torch operations."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from eps_core.attention.stats import StepOutput
from eps_core.decode.array_model import ArrayModel
from eps_core.decode.draft_weights import FLAG
from eps_core.errors import ConfigError
from eps_core.kv_cache.step_plan import StepPlan
from eps_core.models.spec import ModelSpec
from eps_core.models.weights import load_weights
from eps_cuda.cache import Cache
from eps_cuda.device import DTYPES, device_of, from_numpy
from eps_cuda.draft_weights import Packed, pack
from eps_cuda.ops import OPS

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


class Model(ArrayModel):
    ops, activations = OPS, ACTIVATIONS

    @torch.inference_mode()
    def quantised(self) -> Self:
        if self.device != "cpu":
            raise ConfigError(
                f"4-bit draft weights need the CPU in Torch, and the model is on {self.device}: add {FLAG}"
            )
        return super().quantised()

    def pack(self, weight: Tensor, group_size: int) -> Packed:
        return pack(weight, group_size)

    def scope(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def embed(self, tokens: np.ndarray) -> Tensor:
        return self.embedded(torch.from_numpy(np.asarray(tokens, np.int64)).to(self.device))

    def embedded(self, tokens: Tensor) -> Tensor:
        """`embed` of tokens [N] int64 that lie on the device."""
        embedded: Tensor = self.weights["embed"][tokens] * self.embed_scale
        return embedded

    def norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[name], self.spec.norm_eps)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

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
    return Model(spec, weights, dtype, place, from_numpy(np.array(spec.embed_scale, np.float32), dtype, place))
