"""MLX's CPU arrays for the compiled kernels of `eps_core.cpu.kernels`, and back.

What the kernels read is evaluated first and read in place. No view of the cache outlives a call: one that did would
make the next slice assignment copy a whole pool. Kernels run on threads of our own: MLX's cannot be reached.
"""

import mlx.core as mx
import numpy as np

from eps_core.backend.cpu import CpuKernels
from eps_mlx.ops import OPS


class MlxKernels(CpuKernels):
    ops = OPS

    def host(self, array: mx.array) -> np.ndarray:
        """Synchronises."""
        return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)

    def array(self, array: np.ndarray) -> mx.array:
        return mx.array(array)


def settle() -> None:
    """Waits until no thread of a kernel holds a view of a pool any more: a write would copy the pool."""
    from eps_core.cpu import threads

    threads.settle()


kernels = MlxKernels()
KERNELS = kernels.table(settle)
