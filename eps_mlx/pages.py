"""How K and V lie: a pool [P, Hkv, U, D] a layer, as they are or as codes, written by slot, read by unit or by tile (a
group of one kv head). What codes are: `eps_core.oracle.pages`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from eps_mlx.summaries.rq import pack_codes, unpack_codes

LEAST = 2.0**-126


@dataclass
class CodePool:
    """K or V as codes [P, Hkv, U, D] int8, or two of 4 bits a byte, [P, Hkv, U, D / 2] uint8: code + 8, the even
    dimension in the low bits; scale [P, Hkv, U] float16."""

    codes: mx.array
    scale: mx.array
    bits: int
    dtype: mx.Dtype  # of what is read


Pool = mx.array | CodePool


def new_pool(shape: Sequence[int], dtype: mx.Dtype, bits: int) -> Pool:
    """An empty pool [P, Hkv, U, D]: of 16 bits an array of `dtype`."""
    if bits == 16:
        return mx.zeros(shape, dtype)
    wide, kind = (shape[-1], mx.int8) if bits == 8 else (shape[-1] // 2, mx.uint8)
    return CodePool(mx.zeros((*shape[:-1], wide), kind), mx.zeros(shape[:-1], mx.float16), bits, dtype)


def quantise(rows: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """(codes [.., D] int8 or [.., D / 2] uint8, scale [..] float16) of rows [.., D]."""
    x = rows.astype(mx.float32)
    largest = mx.abs(x).max(axis=-1)
    wanted = largest / (2 ** (bits - 1) - 1)
    scale = wanted.astype(mx.float16)
    scale = mx.where(scale.astype(mx.float32) < wanted, (scale.view(mx.int16) + 1).view(mx.float16), scale)
    scale = mx.where(largest < LEAST, mx.zeros_like(scale), scale)
    usable = (mx.isfinite(scale) & (scale > 0))[..., None]
    codes = mx.round(mx.where(usable, x, 0) / mx.where(usable, scale[..., None], 1).astype(mx.float32)).astype(mx.int8)
    return (codes if bits == 8 else pack_codes(codes + 8, bits)), scale


def dequantise(codes: mx.array, scale: mx.array, bits: int, dtype: mx.Dtype) -> mx.array:
    """Rows [.., D] of `dtype` from what `quantise` gave."""
    if bits == 4:
        codes = unpack_codes(codes, bits, 2 * codes.shape[-1]).astype(mx.int8) - 8
    values = codes.astype(mx.float32) * scale.astype(mx.float32)[..., None]
    if dtype == mx.float16:  # whose largest number's code can round past it
        values = mx.clip(values, -65504.0, 65504.0)
    return values.astype(dtype)


def held(pool: Pool, rows: mx.array) -> mx.array:
    """What a pool holds of rows [.., D] of its dtype."""
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


def units_of(pool: Pool, units: np.ndarray) -> mx.array:
    """Units [M] of a pool [P, ...]: a slice where they are consecutive, else a gather."""
    if isinstance(pool, CodePool):
        return dequantise(units_of(pool.codes, units), units_of(pool.scale, units), pool.bits, pool.dtype)
    if len(units) and (np.diff(units) == 1).all():
        return pool[int(units[0]) : int(units[0]) + len(units)]
    return mx.take(pool, mx.array(units.astype(np.int32)), axis=0)


def copies_of(pool: Pool, units: np.ndarray) -> mx.array:
    """`units_of`, never a slice: who keeps one keeps the pool's buffer, which the next write then copies whole."""
    return (
        units_of(pool, units) if isinstance(pool, CodePool) else mx.take(pool, mx.array(units.astype(np.int32)), axis=0)
    )


def tiles_of(pool: Pool, rows: mx.array, group_tokens: int) -> mx.array:
    """Tiles rows [..] of a pool, numbered as its memory lies ((unit * Hkv + head) * U / S + group in the unit):
    [.., S, D], a copy."""
    if isinstance(pool, CodePool):
        codes, scale = (tiles_of(one, rows, group_tokens) for one in (pool.codes, pool.scale[..., None]))
        return dequantise(codes, scale[..., 0], pool.bits, pool.dtype)
    head_dim = pool.shape[-1]
    tiles = mx.take(pool.reshape(-1, group_tokens * head_dim), rows, axis=0)
    return tiles.reshape(*rows.shape, group_tokens, head_dim)


def arrays_of(pool: Pool) -> list[mx.array]:
    """What a pool consists of, each [P, ..]."""
    return [pool] if isinstance(pool, mx.array) else [pool.codes, pool.scale]


def each(pool: Pool, change: Callable[[mx.array], mx.array]) -> Pool:
    """The pool of its changed arrays."""
    if isinstance(pool, mx.array):
        return change(pool)
    return replace(pool, codes=change(pool.codes), scale=change(pool.scale))


def longer(array: mx.array, length: int) -> mx.array:
    """An array [P, ..] of a pool with more, empty rows."""
    return mx.concatenate([array, mx.zeros((length - len(array), *array.shape[1:]), array.dtype)])
