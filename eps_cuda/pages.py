"""How K and V lie: a pool [P, Hkv, U, D] a layer, as they are or as codes, written by slot, read by unit or by tile (a
group of one kv head). What codes are: `codes`.

Our own pools are contiguous. Those of an engine are views of its memory, with any strides of unit, head and token, but
the D elements of a row together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eps_core.config.formats import AS_THEY_ARE, FORMATS, FormatName
from eps_cuda.codes import dequantise, quantise
from eps_cuda.device import empty_pool


@dataclass
class CodePool:
    """K or V as codes [P, Hkv, U, bytes of a row], int8 or uint8, in the format that `bits` names; of 4 bits two lie in
    a byte, the even dimension in the low ones, int4 as code + 8; scale [P, Hkv, U] float16."""

    codes: Tensor
    scale: Tensor
    bits: FormatName
    dtype: torch.dtype  # of what is read

    @property
    def shape(self) -> tuple[int, ...]:
        """[P, Hkv, U, D] of what is read, of formats that kernels read."""
        return (*self.codes.shape[:3], self.codes.shape[3] * 8 // int(self.bits))


Pool = Tensor | CodePool


def new_pool(shape: Sequence[int], dtype: torch.dtype, bits: FormatName, place: torch.device) -> Pool:
    """An empty pool [P, Hkv, U, D]: as they are an array of `dtype`."""
    if bits == AS_THEY_ARE:
        return empty_pool(shape, dtype, place).zero_()
    form = FORMATS[bits]
    codes = empty_pool((*shape[:-1], form.code_bytes(shape[-1])), getattr(torch, form.code_dtype), place)
    scale = empty_pool(shape[:-1], torch.float16, place)
    return CodePool(codes.zero_(), scale.zero_(), bits, dtype)


def held(pool: Pool, rows: Tensor) -> Tensor:
    """Return rows [.., D] of its dtype as a pool holds them."""
    return rows if isinstance(pool, Tensor) else dequantise(*quantise(rows, pool.bits), pool.bits, pool.dtype)


def write(pool: Pool, units: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    """Writes rows [N, Hkv, D] to offsets [N] of units [N], in place, and returns them as the pool holds them."""
    if isinstance(pool, Tensor):
        pool[units, :, offsets] = rows
        return rows
    codes, scale = quantise(rows, pool.bits)
    pool.codes[units, :, offsets], pool.scale[units, :, offsets] = codes, scale
    return dequantise(codes, scale, pool.bits, pool.dtype)


def move(pool: Pool, src: Sequence[Tensor], dst: Sequence[Tensor]) -> Tensor:
    """Copies rows from (units [N], offsets [N]) to others as they lie, codes not made again, and returns them
    [N, Hkv, D] as the pool holds them."""
    rows = [array[src[0], :, src[1]] for array in arrays_of(pool)]
    for array, moved in zip(arrays_of(pool), rows, strict=True):
        array[dst[0], :, dst[1]] = moved
    return rows[0] if isinstance(pool, Tensor) else dequantise(rows[0], rows[1], pool.bits, pool.dtype)


def units_of(pool: Pool, units: np.ndarray) -> Tensor:
    """Units [M] of a pool [P, ...]: a view where they are consecutive and no codes, else a copy."""
    if isinstance(pool, CodePool):
        return dequantise(units_of(pool.codes, units), units_of(pool.scale, units), pool.bits, pool.dtype)
    if len(units) and (np.diff(units) == 1).all():
        return pool[int(units[0]) : int(units[0]) + len(units)]
    return pool.index_select(0, torch.from_numpy(units.astype(np.int64)).to(pool.device))


def tiles_of(pool: Pool, rows: Tensor, group_size: int) -> Tensor:
    """Tiles rows [..] of a pool, numbered as a contiguous one lies ((unit * Hkv + head) * U / S + group in the unit):
    [.., S, D], a copy."""
    if isinstance(pool, CodePool):
        codes, scale = (tiles_of(one, rows, group_size) for one in (pool.codes, pool.scale[..., None]))
        return dequantise(codes, scale[..., 0], pool.bits, pool.dtype)
    _, kv_heads, unit_tokens, head_dim = pool.shape
    if not pool.is_contiguous():
        per_unit = unit_tokens // group_size
        at, sub = rows.div(per_unit, rounding_mode="floor"), rows % per_unit
        tiles = pool.unflatten(2, (per_unit, group_size))
        return tiles[at.div(kv_heads, rounding_mode="floor"), at % kv_heads, sub]
    tiles = pool.view(-1, group_size * head_dim).index_select(0, rows.reshape(-1))
    return tiles.view(*rows.shape, group_size, head_dim)


def first_rows(pool: Pool, units: Tensor) -> Tensor:
    """Return the rows [N, Hkv, D] of the first tokens of units [N], a copy."""
    if isinstance(pool, CodePool):
        codes, scale = (first_rows(one, units) for one in arrays_of(pool))
        return dequantise(codes, scale, pool.bits, pool.dtype)
    return pool[:, :, 0].index_select(0, units)


def in_order(pool: Pool, units: np.ndarray, length: int) -> Tensor:
    """Return the first `length` rows [length, Hkv, D] of units in their order, a copy. Each head is contiguous in
    memory."""
    by_head = units_of(pool, units).transpose(0, 1)  # [Hkv, M, U, D]
    return by_head.clone(memory_format=torch.contiguous_format).flatten(1, 2)[:, :length].transpose(0, 1)


def arrays_of(pool: Pool) -> list[Tensor]:
    """Return the arrays that a pool consists of, each [P, ..]."""
    return [pool] if isinstance(pool, Tensor) else [pool.codes, pool.scale]


def each(pool: Pool, change: Callable[[Tensor], Tensor]) -> Pool:
    """The pool of its changed arrays."""
    if isinstance(pool, Tensor):
        return change(pool)
    return replace(pool, codes=change(pool.codes), scale=change(pool.scale))


def longer(array: Tensor, length: int) -> Tensor:
    """An array [P, ..] of a pool with more, empty rows."""
    more = empty_pool((length, *array.shape[1:]), array.dtype, array.device)
    more[: len(array)] = array
    more[len(array) :] = 0
    return more
