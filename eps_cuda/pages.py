"""How K and V lie: a pool [P, Hkv, U, D] a layer, as they are or as codes, written by slot, read by unit or by tile (a
group of one kv head). What codes are: `eps_core.oracle.pages`.

Our own pools are contiguous. Those of an engine are views of its memory, with any strides of unit, head and token, but
the D elements of a row together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eps_cuda.device import empty_pool
from eps_cuda.summaries.rq import pack_codes, unpack_codes

LEAST = 2.0**-126


@dataclass
class CodePool:
    """K or V as codes [P, Hkv, U, D] int8, or two of 4 bits a byte, [P, Hkv, U, D / 2] uint8: code + 8, the even
    dimension in the low bits; scale [P, Hkv, U] float16."""

    codes: Tensor
    scale: Tensor
    bits: int
    dtype: torch.dtype  # of what is read


Pool = Tensor | CodePool


def new_pool(shape: Sequence[int], dtype: torch.dtype, bits: int, place: torch.device) -> Pool:
    """An empty pool [P, Hkv, U, D]: of 16 bits an array of `dtype`."""
    if bits == 16:
        return empty_pool(shape, dtype, place).zero_()
    wide, kind = (shape[-1], torch.int8) if bits == 8 else (shape[-1] // 2, torch.uint8)
    codes, scale = empty_pool((*shape[:-1], wide), kind, place), empty_pool(shape[:-1], torch.float16, place)
    return CodePool(codes.zero_(), scale.zero_(), bits, dtype)


def quantise(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(codes [.., D] int8 or [.., D / 2] uint8, scale [..] float16) of rows [.., D]."""
    x = rows.float()
    largest = x.abs().amax(dim=-1)
    # a tensor: GPUs multiply by the reciprocal of a number
    wanted = largest / torch.full_like(largest, 2 ** (bits - 1) - 1)
    scale = wanted.to(torch.float16)
    scale = torch.where(scale.float() < wanted, (scale.view(torch.int16) + 1).view(torch.float16), scale)
    scale = torch.where(largest < LEAST, 0.0, scale)
    usable = torch.isfinite(scale) & (scale > 0)
    codes = torch.where(usable[..., None], (x / scale.float()[..., None]).round(), 0.0).to(torch.int8)
    return (codes if bits == 8 else pack_codes(codes + 8, bits)), scale


def dequantise(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Rows [.., D] of `dtype` from what `quantise` gave."""
    if bits == 4:
        codes = unpack_codes(codes, bits, 2 * codes.shape[-1]).to(torch.int8) - 8
    values = codes.float() * scale.float()[..., None]
    if dtype == torch.float16:  # whose largest number's code can round past it
        values = values.clamp(-65504.0, 65504.0)
    return values.to(dtype)


def held(pool: Pool, rows: Tensor) -> Tensor:
    """What a pool holds of rows [.., D] of its dtype."""
    return rows if isinstance(pool, Tensor) else dequantise(*quantise(rows, pool.bits), pool.bits, pool.dtype)


def write(pool: Pool, units: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
    """Writes rows [N, Hkv, D] to offsets [N] of units [N], in place, and returns them as the pool holds them."""
    if isinstance(pool, Tensor):
        pool[units, :, offsets] = rows
        return rows
    codes, scale = quantise(rows, pool.bits)
    pool.codes[units, :, offsets], pool.scale[units, :, offsets] = codes, scale
    return dequantise(codes, scale, pool.bits, pool.dtype)


def units_of(pool: Pool, units: np.ndarray) -> Tensor:
    """Units [M] of a pool [P, ...]: a view where they are consecutive and no codes, else a copy."""
    if isinstance(pool, CodePool):
        return dequantise(units_of(pool.codes, units), units_of(pool.scale, units), pool.bits, pool.dtype)
    if len(units) and (np.diff(units) == 1).all():
        return pool[int(units[0]) : int(units[0]) + len(units)]
    return pool.index_select(0, torch.from_numpy(units.astype(np.int64)).to(pool.device))


def tiles_of(pool: Pool, rows: Tensor, group_tokens: int) -> Tensor:
    """Tiles rows [..] of a pool, numbered as a contiguous one lies ((unit * Hkv + head) * U / S + group in the unit):
    [.., S, D], a copy."""
    if isinstance(pool, CodePool):
        codes, scale = (tiles_of(one, rows, group_tokens) for one in (pool.codes, pool.scale[..., None]))
        return dequantise(codes, scale[..., 0], pool.bits, pool.dtype)
    _, kv_heads, unit_tokens, head_dim = pool.shape
    if not pool.is_contiguous():
        per_unit = unit_tokens // group_tokens
        at, sub = rows.div(per_unit, rounding_mode="floor"), rows % per_unit
        tiles = pool.unflatten(2, (per_unit, group_tokens))
        return tiles[at.div(kv_heads, rounding_mode="floor"), at % kv_heads, sub]
    tiles = pool.view(-1, group_tokens * head_dim).index_select(0, rows.reshape(-1))
    return tiles.view(*rows.shape, group_tokens, head_dim)


def arrays_of(pool: Pool) -> list[Tensor]:
    """What a pool consists of, each [P, ..]."""
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
