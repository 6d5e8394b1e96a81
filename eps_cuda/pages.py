"""How K and V lie: a pool [P, Hkv, U, D] a layer, written by slot, read by unit or by tile (a group of one kv head).

Our own pools are contiguous. Those of an engine are views of its memory, with any strides of unit, head and token, but
the D elements of a row together.
"""

import numpy as np
import torch
from torch import Tensor


def write(pool: Tensor, units: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Writes rows [N, Hkv, D] to offsets [N] of units [N], in place."""
    pool[units, :, offsets] = rows


def units_of(pool: Tensor, units: np.ndarray) -> Tensor:
    """Units [M] of a pool [P, ...]: a view where they are consecutive, else a copy."""
    first, num = int(units[0]), len(units)
    if (np.diff(units) == 1).all():
        return pool[first : first + num]
    return pool.index_select(0, torch.from_numpy(units.astype(np.int64)).to(pool.device))


def tiles_of(pool: Tensor, rows: Tensor, group_tokens: int) -> Tensor:
    """Tiles rows [..] of a pool, numbered as a contiguous one lies ((unit * Hkv + head) * U / S + group in the unit):
    [.., S, D], a copy."""
    _, kv_heads, unit_tokens, head_dim = pool.shape
    if not pool.is_contiguous():
        per_unit = unit_tokens // group_tokens
        at, sub = rows.div(per_unit, rounding_mode="floor"), rows % per_unit
        tiles = pool.unflatten(2, (per_unit, group_tokens))
        return tiles[at.div(kv_heads, rounding_mode="floor"), at % kv_heads, sub]
    tiles = pool.view(-1, group_tokens * head_dim).index_select(0, rows.reshape(-1))
    return tiles.view(*rows.shape, group_tokens, head_dim)
