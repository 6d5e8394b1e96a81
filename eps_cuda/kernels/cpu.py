"""Torch's CPU arrays for the compiled kernels of `eps_core.cpu.kernels`, and back, without copies.

What kernels give is made of numpy arrays, so nothing is recorded for gradients and no call need enter inference mode.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eps_core.backend.cpu import CpuKernels
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


class TorchKernels(CpuKernels):
    ops = OPS

    def place(self, cache: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def host(self, array: Tensor) -> np.ndarray:
        return _memory(array if array.is_contiguous() else array.contiguous())

    def pools(self, cache: Any) -> Callable[[Tensor], np.ndarray]:
        """`_memory` of what a cache keeps, which is found once: a layer asks for a dozen."""

        def view(pool: Tensor) -> np.ndarray:
            found = cache.views.get(id(pool))
            if found is None:
                found = cache.views[id(pool)] = pool, _memory(pool)
            return found[1]

        return view

    def array(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def run(self, kernel: Any, phases: int, *args: Any, alone: bool = False) -> None:
        _team()[0](kernel, phases, *args, alone=alone)


kernels = TorchKernels()
KERNELS = kernels.table()
