"""Tokens that may be taken back, and the groups that draft steps selected."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from eps_core.attention.protocol import Selection
from eps_core.kv_cache.counts import check_write
from eps_mlx.cache import Cache, mark_valid, write_rows
from eps_mlx.device import DTYPES
from eps_mlx.selection import selection_mask


def write_kv_tentative(cache: Cache, layer: int, k: mx.array, v: mx.array, slots: np.ndarray) -> Cache:
    """Writes k, v [N, Hkv, D] to pool slots [N] (host) and nothing else: of what lies there no summary speaks until
    `write_kv` writes it again. For tokens that may be taken back; NaN and Inf are kept as they are."""
    slots = np.asarray(slots, np.int64)
    check_write(cache.spec, cache.cache_config, (k.shape, v.shape), slots)
    if not len(slots):
        return cache
    with mx.stream(cache.stream):
        write_rows(cache, layer, k.astype(DTYPES[cache.spec.dtype]), v.astype(DTYPES[cache.spec.dtype]), slots)
    for one in (cache, cache.bound, cache.correction):
        if one is not None and one.cache_config.enabled:
            changed = one.state[layer].invalidate(slots)
            if len(changed):
                mark_valid(one, layer, changed)
    return cache


def take(cache: Cache, array: mx.array, index: np.ndarray) -> mx.array:
    """Rows [N, ..] of an array [T, ..]: index [N], host."""
    with mx.stream(cache.stream):
        return mx.take(array, mx.array(np.asarray(index, np.int32)), axis=0)


def visits(cache: Cache, drafts: Sequence[tuple[Selection, int] | None], num_groups: int) -> mx.array:
    """Return what T steps selected, [T, Hkv, G] bool: each a selection and one of its sequences, None for all."""
    with mx.stream(cache.stream):
        every = mx.ones((cache.spec.num_kv_heads, num_groups), mx.bool_)
        return mx.stack([every if one is None else selection_mask(one[0], num_groups)[one[1]] for one in drafts])
