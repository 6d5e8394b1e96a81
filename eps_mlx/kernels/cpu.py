"""MLX's CPU arrays for the compiled kernels of `eps_core.cpu.kernels`, and back.

What the kernels read is evaluated first and read in place. No view of the cache outlives a call: one that did would
make the next slice assignment copy a whole pool. Kernels run on threads of our own: MLX's cannot be reached.
"""

from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import numpy as np

from eps_core.backend.cpu import CpuKernels
from eps_mlx.summaries.base import mean_codes, near16, to_byte, widened
from eps_mlx.summaries.rq import pack_codes


class MlxKernels(CpuKernels):
    def place(self, cache: Any) -> AbstractContextManager[Any]:
        stream: AbstractContextManager[Any] = mx.stream(cache.stream)
        return stream

    def host(self, array: mx.array) -> np.ndarray:
        """Synchronises."""
        return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)

    def array(self, array: np.ndarray) -> mx.array:
        return mx.array(array)

    def float32(self, array: mx.array) -> mx.array:
        return array.astype(mx.float32)

    def like(self, array: mx.array, other: mx.array) -> mx.array:
        return array.astype(other.dtype)

    def is_bfloat16(self, array: mx.array) -> bool:
        return bool(array.dtype == mx.bfloat16)

    def boolean(self, array: mx.array) -> mx.array:
        return array.astype(mx.bool_)

    def mean_fields(self, mean: mx.array, bits: int) -> tuple[dict[str, mx.array], mx.array]:
        most = 2 ** (bits - 1) - 1
        codes, scale = mean_codes(mean, most)
        fields = {"mean": pack_codes(codes.astype(mx.int32) + (most + 1), bits), "mean_scale": scale}
        return fields, widened(codes) * widened(scale)[..., None]

    def rounded(self, array: mx.array) -> mx.array:
        return to_byte(near16(array))


def settle() -> None:
    """Waits until no thread of a kernel holds a view of a pool any more: a write would copy the pool."""
    from eps_core.cpu import threads

    threads.settle()


kernels = MlxKernels()
KERNELS = kernels.table(settle)
