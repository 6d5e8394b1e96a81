"""MLX's array operations, by the names of `eps_core.backend.ops`."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np

from eps_core.backend.ops import Ops
from eps_core.backend.summaries.rq import levels_of, unpack_codes
from eps_mlx.device import DTYPES, device_of
from eps_mlx.kernels.choose import kernels_of

FULL = {bool: mx.bool_, int: mx.int32, float: mx.float32}  # dtypes of `full`
RUN_GROUPS = 32  # numbers that `log_running` adds in a row; changes rounding only


def _reduced(reduce: Callable[..., mx.array]) -> Any:
    return staticmethod(lambda x, axis=-1, keepdims=False: reduce(x, axis=axis, keepdims=keepdims))


def _cast(dtype: mx.Dtype) -> Any:
    return staticmethod(lambda x: x.astype(dtype))


class MlxOps(Ops, library=mx):
    softplus = staticmethod(lambda x: mx.logaddexp(0.0, x))
    norms = staticmethod(lambda x: mx.sqrt((x * x).sum(axis=-1)))
    softmax = staticmethod(lambda x: mx.softmax(x, axis=-1))
    running_count = staticmethod(lambda mask: mx.cumsum(mask.astype(mx.int32), axis=-1))
    take_along = staticmethod(lambda x, index: mx.take_along_axis(x, index, axis=-1))
    flip = staticmethod(lambda x: x[..., ::-1])
    triangle = staticmethod(lambda matrix: mx.linalg.qr(matrix, stream=mx.cpu)[1])
    signbit = staticmethod(lambda x: (x.view(mx.uint32) >> 31).astype(mx.int32))
    cast = staticmethod(mx.array.astype)
    copy = staticmethod(lambda x: x)  # no write changes an array that somebody holds
    widest, is_whole = staticmethod(lambda x: x), staticmethod(lambda pool: True)
    kernels_of = staticmethod(kernels_of)
    dtypes, short, gpu_family = DTYPES, mx.uint16, "metal"
    keeps_views = False  # the next write would copy the whole pool
    max, min = _reduced(mx.max), _reduced(mx.min)
    float32, float16, int8 = _cast(mx.float32), _cast(mx.float16), _cast(mx.int8)
    boolean, uint8, int32, int64 = _cast(mx.bool_), _cast(mx.uint8), _cast(mx.int32), _cast(mx.int64)

    def place(self, cache: Any = None) -> AbstractContextManager[Any]:
        if cache is None:
            return nullcontext()
        stream: AbstractContextManager[Any] = mx.stream(device_of(cache.device))
        return stream

    def settle(self, cache: Any, layer: int) -> None:
        super().settle(cache, layer)
        cache.k.opened.settle(layer)

    def on(self, like: Any, array: np.ndarray) -> mx.array:
        return mx.array(array)

    def index(self, like: Any, array: np.ndarray) -> mx.array:
        return mx.array(array.astype(np.int32, copy=False))

    def host(self, array: mx.array) -> np.ndarray:
        if array.dtype == mx.bfloat16:
            return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(array)

    def native(self, like: Any, array: np.ndarray) -> mx.array:
        if array.dtype == ml_dtypes.bfloat16:
            return mx.array(np.ascontiguousarray(array).view(np.uint16)).view(mx.bfloat16)
        return mx.array(array)

    def new(self, device: Any, shape: Sequence[int], dtype: str) -> mx.array:
        return mx.zeros(shape, getattr(mx, dtype))

    def full(self, like: Any, shape: Sequence[int], value: bool | int | float) -> mx.array:
        return mx.full(shape, value, FULL[type(value)])

    def by_token(self, units: mx.array, length: int) -> mx.array:
        rows = units.swapaxes(1, 2)
        return mx.contiguous(rows.reshape(-1, *rows.shape[2:])[:length])

    def longer(self, array: mx.array, length: int) -> mx.array:
        return mx.concatenate([array, mx.zeros((length - len(array), *array.shape[1:]), array.dtype)])

    def gather_rows(self, array: mx.array, rows: mx.array) -> mx.array:
        return mx.take(array, rows, axis=0)

    def put_along(self, x: mx.array, index: mx.array, values: mx.array | bool) -> mx.array:
        return mx.put_along_axis(x, index, mx.array(values) if isinstance(values, bool) else values, axis=-1)

    def log_running(self, x: mx.array) -> mx.array:
        """In runs: the library's scan of 64k values in a row is off by a hundred times the margin of bounds on a
        CPU."""
        lead, groups = x.shape[:-1], x.shape[-1]
        if groups <= RUN_GROUPS:
            return mx.logcumsumexp(x, axis=-1)
        within = mx.logcumsumexp(self.pad(x, -groups % RUN_GROUPS).reshape(*lead, -1, RUN_GROUPS), axis=-1)
        before = mx.concatenate([mx.full((*lead, 1), -math.inf), self.log_running(within[..., :-1, -1])], axis=-1)
        return mx.logaddexp(within, before[..., None]).reshape(*lead, -1)[..., :groups]

    def best_first(self, keys: mx.array) -> mx.array:
        """A sort need not be stable: the second one is of whole numbers, (place among the different keys, index)."""
        groups = keys.shape[-1]
        falling = mx.argsort(-keys, axis=-1).astype(mx.int32)
        values = mx.take_along_axis(keys, falling, axis=-1)
        differs = (values[..., 1:] != values[..., :-1]).astype(mx.int64)
        place = mx.pad(mx.cumsum(differs, axis=-1), [(0, 0)] * (keys.ndim - 1) + [(1, 0)])
        return (mx.sort(place * groups + falling, axis=-1) % groups).astype(mx.int32)

    def kth_largest(self, keys: mx.array, count: mx.array, most: int) -> mx.array:
        groups = keys.shape[-1]
        # the `most` largest as values, then in order: a full sort costs several times as much
        rising = mx.sort(mx.partition(keys, groups - most, axis=-1)[..., groups - most :], axis=-1)
        place = mx.broadcast_to(mx.clip(most - count, 0, most - 1), (*keys.shape[:-1], 1))
        return mx.take_along_axis(rising, place, axis=-1)

    def arange(self, like: Any, start: int, stop: int, step: int = 1) -> mx.array:
        return mx.arange(start, stop, step, dtype=mx.int32)

    def variance(self, x: mx.array, axis: int) -> mx.array:
        return x.var(axis=axis)

    def pad(self, x: mx.array, after: int, axis: int = -1, value: float = 0) -> mx.array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, after)
        return mx.pad(x, widths, constant_values=value) if after else x

    def eigh(self, matrix: mx.array) -> tuple[mx.array, mx.array]:
        values, vectors = mx.linalg.eigh(matrix, stream=mx.cpu)  # exists on the CPU only
        return values, vectors

    def to_fp8(self, x: mx.array) -> mx.array:
        """By integers: MLX has `to_fp8` from 0.30 on only. From an exponent of -6 on, eight codes have one step."""
        size = mx.abs(x)
        exponent = mx.maximum((size.view(mx.int32) >> 23) - 127, -6)
        steps = mx.round(size * ((130 - exponent) << 23).view(mx.float32)).astype(mx.int32)
        return (8 * (exponent + 6) + steps + 128 * self.signbit(x)).astype(mx.uint8)

    def from_fp8(self, codes: mx.array) -> mx.array:
        size = codes.astype(mx.int32) & 127
        exponent, steps = mx.maximum(size >> 3, 1), mx.where(size < 8, size, 8 + (size & 7))
        numbers = steps.astype(mx.float32) * ((exponent + 117) << 23).view(mx.float32)
        return mx.where(codes > 127, -numbers, numbers)

    def all_dots(self, codes: mx.array, a: mx.array) -> mx.array:
        return a @ codes.astype(mx.float32).swapaxes(-1, -2)

    def packed_dots(self, packed: mx.array, bits: int, a: mx.array, has_zero: bool = False) -> mx.array:
        head_dim, num_bytes, per_byte = a.shape[-1], packed.shape[-1], 8 // bits
        if bits > 2:
            return a @ levels_of(self, unpack_codes(self, packed, bits, head_dim), bits, has_zero).swapaxes(-1, -2)
        # One table look-up a byte, for all R heads at once: what each of the 256 bytes adds to each inner product.
        # Three times as fast as unpacking into a matrix on a CPU, and a 32nd of its memory.
        batch, kv_heads, repeat, _ = a.shape
        a = self.pad(a, num_bytes * per_byte - head_dim)
        values = mx.arange(256, dtype=mx.uint8)[:, None]
        levels = levels_of(self, unpack_codes(self, values, bits, per_byte), bits, has_zero)
        added = levels @ a.reshape(batch, kv_heads, repeat, num_bytes, per_byte).transpose(0, 1, 3, 4, 2)
        first = mx.arange(batch * kv_heads * num_bytes, dtype=mx.int32).reshape(batch, kv_heads, 1, num_bytes) * 256
        return mx.take(added.reshape(-1, repeat), packed + first, axis=0).sum(axis=3).swapaxes(-1, -2)


OPS = MlxOps()
