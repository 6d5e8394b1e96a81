"""How K and V lie: a pool [P, Hkv, U, D] a layer, as they are or as codes with one scale a row (the D elements of a
token and kv head: `codes`)."""

from typing import Any

import numpy as np

from eps_core.backend.pages import CodePool, Pool, arrays_of
from eps_core.config.formats import AS_THEY_ARE, FORMATS, FormatName
from eps_core.reference.codes import dequantise, quantise


def new_pool(shape: tuple[int, ...], dtype: Any, bits: FormatName) -> Pool:
    """An empty pool [P, Hkv, U, D]: as they are an array of `dtype`."""
    if bits == AS_THEY_ARE:
        return np.zeros(shape, dtype)
    form = FORMATS[bits]
    codes = np.zeros((*shape[:-1], form.code_bytes(shape[-1])), form.code_dtype)
    return CodePool(codes, np.zeros(shape[:-1], np.float16), bits, dtype)


def held(pool: Pool, rows: np.ndarray) -> np.ndarray:
    """Return rows [.., D] of a pool's dtype as the pool holds them."""
    if isinstance(pool, np.ndarray):
        return rows
    return dequantise(*quantise(rows, pool.bits), pool.bits, pool.dtype)


def write(pool: Pool, units: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> None:
    """Writes rows [N, Hkv, D] to offsets [N] of units [N]."""
    if isinstance(pool, np.ndarray):
        pool[units, :, offsets] = rows
    else:
        pool.codes[units, :, offsets], pool.scale[units, :, offsets] = quantise(rows, pool.bits)


def move(pool: Pool, src: tuple[np.ndarray, np.ndarray], dst: tuple[np.ndarray, np.ndarray]) -> None:
    """Copies rows from (units [N], offsets [N]) to others as they lie: codes are not made again."""
    for array in arrays_of(pool):
        array[dst[0], :, dst[1]] = array[src[0], :, src[1]]


def rows_of(pool: Pool, *index: Any) -> np.ndarray:
    """Rows [.., D] at an index of unit, kv head and offset."""
    if isinstance(pool, np.ndarray):
        return pool[index]
    return dequantise(pool.codes[index], pool.scale[index], pool.bits, pool.dtype)
