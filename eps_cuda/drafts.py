"""Tokens that may be taken back, and the groups that draft steps selected."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eps_core.attention.protocol import Selection
from eps_core.kv_cache.counts import check_write
from eps_cuda import pages
from eps_cuda.cache import Cache, mark_valid
from eps_cuda.device import DTYPES
from eps_cuda.selection import selection_mask


@torch.inference_mode()
def write_kv_tentative(cache: Cache, layer: int, k: Tensor, v: Tensor, slots: np.ndarray) -> Cache:
    """Writes k, v [N, Hkv, D] to pool slots [N] (host) and nothing else: of what lies there no summary speaks until
    `write_kv` writes it again. For tokens that may be taken back; NaN and Inf are kept as they are."""
    slots = np.asarray(slots, np.int64)
    check_write(cache.spec, cache.cache_config, (k.shape, v.shape), slots)
    if not len(slots):
        return cache
    units, offsets = (_on(cache, part) for part in np.divmod(slots, cache.cache_config.unit_tokens))
    for pool, rows in ((cache.k, k), (cache.v, v)):
        pages.write(pool[layer], units, offsets, rows.to(DTYPES[cache.spec.dtype]))
    invalidate(cache, layer, slots)
    return cache


def invalidate(cache: Cache, layer: int, slots: np.ndarray) -> None:
    """No summary of the groups of slots [N] counts from there on: on the host, and for kernels."""
    for one in (cache, cache.bound, cache.correction):
        if one is not None and one.cache_config.enabled:
            changed = one.state[layer].invalidate(slots)
            if len(changed):
                mark_valid(one, layer, changed)


@torch.inference_mode()
def take(cache: Cache, array: Tensor, index: np.ndarray) -> Tensor:
    """Rows [N, ..] of an array [T, ..]: index [N], host."""
    return array.index_select(0, _on(cache, np.asarray(index, np.int64)))


def _on(cache: Cache, array: np.ndarray) -> Tensor:
    """A host array on the cache's device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(cache.device)


@torch.inference_mode()
def visits(cache: Cache, drafts: Sequence[tuple[Selection, int] | None], num_groups: int) -> Tensor:
    """Return what T steps selected, [T, Hkv, G] bool: each a selection and one of its sequences, None for all."""
    every = torch.ones((cache.spec.num_kv_heads, num_groups), dtype=torch.bool, device=cache.device)
    return torch.stack([every if one is None else selection_mask(one[0], num_groups)[one[1]] for one in drafts])
