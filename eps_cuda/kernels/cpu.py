"""Torch's CPU arrays for the compiled kernels of `eps_core.cpu.kernels`, and back, without copies.

What kernels give is made of numpy arrays, so nothing is recorded for gradients and no call need enter inference mode.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eps_core.attention.kernels import Kernel
from eps_core.backend.cpu import CpuKernels
from eps_core.cpu import calls, write
from eps_cuda.device import DTYPES
from eps_cuda.ops import OPS


@functools.cache
def _team() -> tuple[Callable[..., None], Callable[[], int]]:
    """Return the function that runs kernels, in Torch's own threads where they can be reached, and their number."""
    from eps_core.cpu import openmp, threads

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    run = openmp.team_of(library, torch.get_num_threads)
    return (threads.run, threads.num_threads) if run is None else (run, torch.get_num_threads)


def kernel_threads() -> int:
    """Threads of the compiled kernels."""
    return _team()[1]()


def _memory(array: Tensor) -> np.ndarray:
    """The array's own memory, with the strides that it has; bfloat16 as uint16."""
    if array.requires_grad:
        array = array.detach()
    if array.dtype == torch.bfloat16:
        array = array.view(torch.uint16)
    found: np.ndarray = array.numpy()
    return found


class KeptHost(calls.Host):
    """Shows what a cache keeps, found once: a layer asks for a dozen."""

    def __init__(self, views: dict[Any, Any]) -> None:
        super().__init__(_memory)
        self.views = views

    def __call__(self, array: Tensor) -> np.ndarray:
        return self._once("array", array, super().__call__)

    def flat(self, array: Tensor) -> np.ndarray:
        return self._once("flat", array, super().flat)

    def rows(self, pool: Any, dtype: str) -> tuple[Any, tuple[int, int, int]]:
        return self._once("rows", pool, super().rows, dtype)

    def _once(self, form: str, pool: Any, show: Callable[..., Any], *how: str) -> Any:
        found = self.views.get((form, id(pool)))
        if found is None:
            found = self.views[form, id(pool)] = pool, show(pool, *how)
        return found[1]


class TorchKernels(CpuKernels):
    ops = OPS

    def place(self, cache: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def host(self, array: Tensor) -> np.ndarray:
        return _memory(array if array.is_contiguous() else array.contiguous())

    def pools(self, cache: Any) -> calls.Host:
        return KeptHost(cache.views)

    def array(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def place_rows(
        self, cache: Any, layer: int, k: Tensor, v: Tensor, slots: np.ndarray
    ) -> tuple[Tensor, Tensor, bool]:
        """Return k, v [N, Hkv, D] as they were stored in slots [N], and whether K is finite. A dozen Torch operations
        for a row take the time of a small product of matrices."""
        of = DTYPES[cache.spec.dtype]
        k, v, host = k.to(of).contiguous(), v.to(of).contiguous(), self.pools(cache)
        (k_pool, k_strides), (v_pool, v_strides) = (
            host.rows(pool[layer], cache.spec.dtype) for pool in (cache.k, cache.v)
        )
        rows = (_memory(one).view(k_pool.dtype) for one in (k, v))
        unit_tokens = cache.cache_config.unit_tokens
        return k, v, write.place_rows(k_pool, v_pool, k_strides, v_strides, *rows, slots, unit_tokens)

    def run(self, kernel: Any, phases: int, *args: Any, alone: bool = False) -> None:
        _team()[0](kernel, phases, *args, alone=alone)


def _unsupported_rows(cache: Any, layer: int, k: Tensor, v: Tensor, slots: np.ndarray) -> str | None:
    return f"K in {cache.spec.k_bits} and V in {cache.spec.v_bits}" if cache.spec.quantised else None


kernels = TorchKernels()
KERNELS = replace(kernels.table(), place_rows=Kernel(kernels.place_rows, _unsupported_rows))
