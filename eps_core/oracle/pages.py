"""How K and V lie: a pool [P, Hkv, U, D] a layer, as they are or as codes with one scale a row (the D elements of a
token and kv head).

The quantiser is symmetric, in float32 with one division, so that codes are the same in every library:

    scale = the least float16 that is at least max|x| / m, m = 2^(bits - 1) - 1; 0 where max|x| < 2^-126, since GPUs
            take such numbers for 0
    code  = round half to even (x / scale), which cannot leave +-m; 0 where the scale is 0
    value = code * scale, exact in float32, then rounded to the cache's dtype and kept within its range

A finite x is then within scale / 2 of code * scale (within 2^-126 where the scale is 0). A row with NaN or Inf, or
whose scale is beyond float16, is NaN throughout: what refuses these refuses it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

LEAST = np.float32(2.0**-126)


@dataclass
class CodePool:
    """K or V as codes [P, Hkv, U, D] int8, or two of 4 bits a byte, [P, Hkv, U, D / 2] uint8: code + 8, the even
    dimension in the low bits; scale [P, Hkv, U] float16."""

    codes: np.ndarray
    scale: np.ndarray
    bits: int
    dtype: Any  # of what is read


Pool = np.ndarray | CodePool


def new_pool(shape: tuple[int, ...], dtype: Any, bits: int) -> Pool:
    """An empty pool [P, Hkv, U, D]: of 16 bits an array of `dtype`."""
    if bits == 16:
        return np.zeros(shape, dtype)
    wide, kind = (shape[-1], np.int8) if bits == 8 else (shape[-1] // 2, np.uint8)
    return CodePool(np.zeros((*shape[:-1], wide), kind), np.zeros(shape[:-1], np.float16), bits, dtype)


def quantise(rows: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes [.., D] int8 or [.., D / 2] uint8, scale [..] float16) of rows [.., D]."""
    x, most = rows.astype(np.float32), np.float32(2 ** (bits - 1) - 1)
    largest = np.abs(x).max(axis=-1)
    with np.errstate(over="ignore"):
        wanted = largest / most
        scale = wanted.astype(np.float16)
        scale = np.where(scale.astype(np.float32) < wanted, np.nextafter(scale, np.float16(np.inf)), scale)
    scale = np.where(largest < LEAST, np.float16(0), scale)
    usable = (np.isfinite(scale) & (scale > 0))[..., None]
    codes = np.round(np.where(usable, x, 0) / np.where(usable, scale[..., None], 1).astype(np.float32)).astype(np.int8)
    if bits == 4:
        low, high = codes[..., ::2] + 8, codes[..., 1::2] + 8
        codes = (low | (high << 4)).astype(np.uint8)
    return codes, scale


def dequantise(codes: np.ndarray, scale: np.ndarray, bits: int, dtype: Any) -> np.ndarray:
    """Rows [.., D] of `dtype` from what `quantise` gave."""
    if bits == 4:
        both = np.stack([codes & 15, codes >> 4], axis=-1).astype(np.int8) - 8
        codes = both.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    with np.errstate(invalid="ignore"):
        values = codes.astype(np.float32) * scale.astype(np.float32)[..., None]
    if dtype == np.float16:  # whose largest number's code can round past it
        values = np.clip(values, -65504, 65504)
    return values.astype(dtype)


def held(pool: Pool, rows: np.ndarray) -> np.ndarray:
    """What a pool holds of rows [.., D] of its dtype."""
    if isinstance(pool, np.ndarray):
        return rows
    return dequantise(*quantise(rows, pool.bits), pool.bits, pool.dtype)


def write(pool: Pool, units: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> None:
    """Writes rows [N, Hkv, D] to offsets [N] of units [N]."""
    if isinstance(pool, np.ndarray):
        pool[units, :, offsets] = rows
    else:
        pool.codes[units, :, offsets], pool.scale[units, :, offsets] = quantise(rows, pool.bits)


def rows_of(pool: Pool, *index: Any) -> np.ndarray:
    """Rows [.., D] at an index of unit, kv head and offset."""
    if isinstance(pool, np.ndarray):
        return pool[index]
    return dequantise(pool.codes[index], pool.scale[index], pool.bits, pool.dtype)


def arrays_of(pool: Pool) -> list[np.ndarray]:
    """What a pool consists of, each [P, ..]."""
    return [pool] if isinstance(pool, np.ndarray) else [pool.codes, pool.scale]


def each(pool: Pool, change: Callable[[np.ndarray], np.ndarray]) -> Pool:
    """The pool of its changed arrays."""
    if isinstance(pool, np.ndarray):
        return change(pool)
    return replace(pool, codes=change(pool.codes), scale=change(pool.scale))
