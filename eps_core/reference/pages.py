"""How K and V lie: a pool [P, Hkv, U, D] a layer, as they are or as codes with one scale a row (the D elements of a
token and kv head: `codes`)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eps_core.config.formats import AS_THEY_ARE, FORMATS, FormatName
from eps_core.reference.codes import dequantise, quantise


@dataclass
class CodePool:
    """K or V as codes [P, Hkv, U, bytes of a row], int8 or uint8, in the format that `bits` names; of 4 bits two lie in
    a byte, the even dimension in the low ones, int4 as code + 8; scale [P, Hkv, U] float16."""

    codes: np.ndarray
    scale: np.ndarray
    bits: FormatName
    dtype: Any  # of what is read


Pool = np.ndarray | CodePool


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


def arrays_of(pool: Pool) -> list[np.ndarray]:
    """Return the arrays of a pool, each [P, ..]."""
    return [pool] if isinstance(pool, np.ndarray) else [pool.codes, pool.scale]


def each(pool: Pool, change: Callable[[np.ndarray], np.ndarray]) -> Pool:
    """The pool of its changed arrays."""
    if isinstance(pool, np.ndarray):
        return change(pool)
    return replace(pool, codes=change(pool.codes), scale=change(pool.scale))
