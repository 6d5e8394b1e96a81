"""How K and V lie: a pool [P, Hkv, U, D] a layer, written by slot, read by unit or by tile (a group of one kv head)."""

import mlx.core as mx
import numpy as np


def write(pool: mx.array, units: mx.array, offsets: mx.array, rows: mx.array) -> None:
    """Writes rows [N, Hkv, D] to offsets [N] of units [N], in place while nobody else holds the buffer."""
    pool[units, :, offsets] = rows


def units_of(pool: mx.array, units: np.ndarray) -> mx.array:
    """Units [M] of a pool [P, ...]: a slice where they are consecutive, else a gather."""
    if (np.diff(units) == 1).all():
        return pool[int(units[0]) : int(units[0]) + len(units)]
    return mx.take(pool, mx.array(units.astype(np.int32)), axis=0)


def tiles_of(pool: mx.array, rows: mx.array, group_tokens: int) -> mx.array:
    """Tiles rows [..] of a pool, numbered as its memory lies ((unit * Hkv + head) * U / S + group in the unit):
    [.., S, D], a copy."""
    head_dim = pool.shape[-1]
    tiles = mx.take(pool.reshape(-1, group_tokens * head_dim), rows, axis=0)
    return tiles.reshape(*rows.shape, group_tokens, head_dim)
