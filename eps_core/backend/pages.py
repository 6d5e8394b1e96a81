"""Storage of K and V: a pool [P, Hkv, U, D] a layer, in the cache's dtype or quantized (`codes`), written by slot, read
by unit or by tile (a group of one kv head).

Our own pools are contiguous. Those of an engine are views of its memory, with any strides of unit, head and token, but
the D elements of a row together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eps_core.attention.protocol import Array
from eps_core.backend.codes import dequantise, quantise
from eps_core.backend.ops import Ops
from eps_core.config.formats import AS_THEY_ARE, FORMATS, FormatName


@dataclass
class CodePool:
    """K or V as codes [P, Hkv, U, bytes of a row], int8 or uint8, in the format that `bits` names; of 4 bits two lie in
    a byte, the even dimension in the low ones, int4 as code + 8; scale [P, Hkv, U] float16."""

    codes: Array
    scale: Array
    bits: FormatName
    dtype: Any  # of what is read

    @property
    def shape(self) -> tuple[int, ...]:
        """[P, Hkv, U, D] of what is read, of formats that kernels read."""
        return (*self.codes.shape[:3], self.codes.shape[3] * 8 // int(self.bits))


Pool = Any  # an array, or a CodePool


def new_pool(ops: Ops, device: Any, shape: Sequence[int], dtype: str, bits: FormatName) -> Pool:
    """An empty pool [P, Hkv, U, D] on a device: as they are an array of `dtype`."""
    if bits == AS_THEY_ARE:
        return ops.new(device, shape, dtype)
    form = FORMATS[bits]
    codes = ops.new(device, (*shape[:-1], form.code_bytes(shape[-1])), form.code_dtype)
    return CodePool(codes, ops.new(device, shape[:-1], "float16"), bits, ops.dtypes[dtype])


def held(ops: Ops, pool: Pool, rows: Array) -> Array:
    """Return rows [.., D] of its dtype as a pool holds them."""
    if not isinstance(pool, CodePool):
        return rows
    return dequantise(ops, *quantise(ops, rows, pool.bits), pool.bits, pool.dtype)


def write(ops: Ops, pool: Pool, units: Array, offsets: Array, rows: Array) -> Array:
    """Writes rows [N, Hkv, D] to offsets [N] of units [N] and returns them as stored. In place, unless another
    reference to the buffer exists (MLX copies it then)."""
    if not isinstance(pool, CodePool):
        pool[units, :, offsets] = rows
        return rows
    codes, scale = quantise(ops, rows, pool.bits)
    pool.codes[units, :, offsets] = codes
    pool.scale[units, :, offsets] = scale
    return dequantise(ops, codes, scale, pool.bits, pool.dtype)


def move(ops: Ops, pool: Pool, src: Sequence[Array], dst: Sequence[Array]) -> Array:
    """Copies rows from (units [N], offsets [N]) to others as they lie, codes not made again, and returns them
    [N, Hkv, D] as the pool holds them."""
    for array in arrays_of(pool):
        array[dst[0], :, dst[1]] = array[src[0], :, src[1]]
    return rows_at(ops, pool, *dst)


def rows_at(ops: Ops, pool: Pool, units: Array, offsets: Array) -> Array:
    """Return the rows [N, Hkv, D] at offsets [N] of units [N], a copy."""
    if isinstance(pool, CodePool):
        codes, scale = (rows_at(ops, one, units, offsets) for one in arrays_of(pool))
        return dequantise(ops, codes, scale, pool.bits, pool.dtype)
    return pool[units, :, offsets]


def units_of(ops: Ops, pool: Pool, units: np.ndarray, sliced: bool = True) -> Array:
    """Units [M] of a pool [P, ...]: a view where they are consecutive and no codes, unless it must not be `sliced`;
    else a copy."""
    if isinstance(pool, CodePool):
        codes, scale = (units_of(ops, one, units) for one in arrays_of(pool))
        return dequantise(ops, codes, scale, pool.bits, pool.dtype)
    if sliced and len(units) and (np.diff(units) == 1).all():
        return pool[int(units[0]) : int(units[0]) + len(units)]
    return ops.gather_rows(pool, ops.index(pool, units))


def tiles_of(ops: Ops, pool: Pool, rows: Array, group_size: int) -> Array:
    """Tiles rows [..] of a pool, numbered as a contiguous one lies ((unit * Hkv + head) * U / S + group in the unit):
    [.., S, D], a copy."""
    if isinstance(pool, CodePool):
        codes, scale = (tiles_of(ops, one, rows, group_size) for one in (pool.codes, pool.scale[..., None]))
        return dequantise(ops, codes, scale[..., 0], pool.bits, pool.dtype)
    _, kv_heads, unit_tokens, head_dim = pool.shape
    per_unit = unit_tokens // group_size
    if ops.is_whole(pool):
        tiles = ops.gather_rows(pool.reshape(-1, group_size * head_dim), rows)
        return tiles.reshape(*rows.shape, group_size, head_dim)
    at = rows // per_unit
    by_group = pool.reshape(*pool.shape[:2], per_unit, group_size, head_dim)  # a view
    return by_group[at // kv_heads, at % kv_heads, rows % per_unit]


def first_rows(ops: Ops, pool: Pool, units: Array) -> Array:
    """Return the rows [N, Hkv, D] of the first tokens of units [N], a copy."""
    if isinstance(pool, CodePool):
        codes, scale = (first_rows(ops, one, units) for one in arrays_of(pool))
        return dequantise(ops, codes, scale, pool.bits, pool.dtype)
    return ops.gather_rows(pool[:, :, 0], units)


def in_order(ops: Ops, pool: Pool, units: np.ndarray, length: int) -> Array:
    """Return the first `length` rows [length, Hkv, D] of units in their order, a copy."""
    return ops.by_token(units_of(ops, pool, units, sliced=ops.keeps_views), length)


def arrays_of(pool: Pool) -> list[Array]:
    """Return the arrays that a pool consists of, each [P, ..]."""
    return [pool.codes, pool.scale] if isinstance(pool, CodePool) else [pool]


def each(pool: Pool, change: Callable[[Array], Array]) -> Pool:
    """The pool of its changed arrays."""
    if isinstance(pool, CodePool):
        return replace(pool, codes=change(pool.codes), scale=change(pool.scale))
    return change(pool)
