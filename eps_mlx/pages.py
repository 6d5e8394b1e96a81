"""How K and V lie: a pool [P, Hkv, U, D] a layer, as they are or as codes, written by slot, read by unit or by tile (a
group of one kv head). What codes are: `codes`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from eps_core.config.formats import AS_THEY_ARE, FORMATS, FormatName
from eps_mlx.codes import dequantise, quantise


@dataclass
class CodePool:
    """K or V as codes [P, Hkv, U, bytes of a row], int8 or uint8, in the format that `bits` names; of 4 bits two lie in
    a byte, the even dimension in the low ones, int4 as code + 8; scale [P, Hkv, U] float16."""

    codes: mx.array
    scale: mx.array
    bits: FormatName
    dtype: mx.Dtype  # of what is read

    @property
    def shape(self) -> tuple[int, ...]:
        """[P, Hkv, U, D] of what is read, of formats that kernels read."""
        return (*self.codes.shape[:3], self.codes.shape[3] * 8 // int(self.bits))


Pool = mx.array | CodePool


def new_pool(shape: Sequence[int], dtype: mx.Dtype, bits: FormatName) -> Pool:
    """An empty pool [P, Hkv, U, D]: as they are an array of `dtype`."""
    if bits == AS_THEY_ARE:
        return mx.zeros(shape, dtype)
    form = FORMATS[bits]
    codes = mx.zeros((*shape[:-1], form.code_bytes(shape[-1])), getattr(mx, form.code_dtype))
    return CodePool(codes, mx.zeros(shape[:-1], mx.float16), bits, dtype)


def held(pool: Pool, rows: mx.array) -> mx.array:
    """Return rows [.., D] of its dtype as a pool holds them."""
    return rows if isinstance(pool, mx.array) else dequantise(*quantise(rows, pool.bits), pool.bits, pool.dtype)


def write(pool: Pool, units: mx.array, offsets: mx.array, rows: mx.array) -> mx.array:
    """Writes rows [N, Hkv, D] to offsets [N] of units [N], in place while nobody else holds the buffer, and returns
    them as the pool holds them."""
    if isinstance(pool, mx.array):
        pool[units, :, offsets] = rows
        return rows
    codes, scale = quantise(rows, pool.bits)
    pool.codes[units, :, offsets] = codes
    pool.scale[units, :, offsets] = scale
    return dequantise(codes, scale, pool.bits, pool.dtype)


def move(pool: Pool, src: Sequence[mx.array], dst: Sequence[mx.array]) -> mx.array:
    """Copies rows from (units [N], offsets [N]) to others as they lie, codes not made again, and returns them
    [N, Hkv, D] as the pool holds them."""
    rows = [array[src[0], :, src[1]] for array in arrays_of(pool)]
    for array, moved in zip(arrays_of(pool), rows, strict=True):
        array[dst[0], :, dst[1]] = moved
    return rows[0] if isinstance(pool, mx.array) else dequantise(rows[0], rows[1], pool.bits, pool.dtype)


def units_of(pool: Pool, units: np.ndarray) -> mx.array:
    """Units [M] of a pool [P, ...]: a slice where they are consecutive, else a gather."""
    if isinstance(pool, CodePool):
        return dequantise(units_of(pool.codes, units), units_of(pool.scale, units), pool.bits, pool.dtype)
    if len(units) and (np.diff(units) == 1).all():
        return pool[int(units[0]) : int(units[0]) + len(units)]
    return mx.take(pool, mx.array(units.astype(np.int32)), axis=0)


def tiles_of(pool: Pool, rows: mx.array, group_size: int) -> mx.array:
    """Tiles rows [..] of a pool, numbered as its memory lies ((unit * Hkv + head) * U / S + group in the unit):
    [.., S, D], a copy."""
    if isinstance(pool, CodePool):
        codes, scale = (tiles_of(one, rows, group_size) for one in (pool.codes, pool.scale[..., None]))
        return dequantise(codes, scale[..., 0], pool.bits, pool.dtype)
    head_dim = pool.shape[-1]
    tiles = mx.take(pool.reshape(-1, group_size * head_dim), rows, axis=0)
    return tiles.reshape(*rows.shape, group_size, head_dim)


def first_rows(pool: Pool, units: mx.array) -> mx.array:
    """Return the rows [N, Hkv, D] of the first tokens of units [N], a copy."""
    if isinstance(pool, CodePool):
        codes, scale = (first_rows(one, units) for one in arrays_of(pool))
        return dequantise(codes, scale, pool.bits, pool.dtype)
    return mx.take(pool[:, :, 0], units, axis=0)


def in_order(pool: Pool, units: np.ndarray, length: int) -> mx.array:
    """Return the first `length` rows [length, Hkv, D] of units in their order, a copy: who keeps a slice keeps the
    pool's buffer, which the next write then copies whole."""
    index = mx.array(units.astype(np.int32))
    held = mx.take(pool, index, axis=0) if isinstance(pool, mx.array) else units_of(pool, units)
    rows = held.swapaxes(1, 2)
    return mx.contiguous(rows.reshape(-1, *rows.shape[2:])[:length])


def arrays_of(pool: Pool) -> list[mx.array]:
    """Return the arrays that a pool consists of, each [P, ..]."""
    return [pool] if isinstance(pool, mx.array) else [pool.codes, pool.scale]


def each(pool: Pool, change: Callable[[mx.array], mx.array]) -> Pool:
    """The pool of its changed arrays."""
    if isinstance(pool, mx.array):
        return change(pool)
    return replace(pool, codes=change(pool.codes), scale=change(pool.scale))


def longer(array: mx.array, length: int) -> mx.array:
    """An array [P, ..] of a pool with more, empty rows."""
    return mx.concatenate([array, mx.zeros((length - len(array), *array.shape[1:]), array.dtype)])
