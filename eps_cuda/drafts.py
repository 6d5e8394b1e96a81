"""Tokens that may be taken back, and the groups that draft steps visited."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eps_core.gate.protocol import Selection
from eps_core.paging.counts import check_write
from eps_cuda import pages
from eps_cuda.cache import Cache, mark_valid
from eps_cuda.device import DTYPES
from eps_cuda.selection import visit_mask


@torch.inference_mode()
def place_kv(cache: Cache, layer: int, k: Tensor, v: Tensor, slots: np.ndarray) -> Cache:
    """Writes k, v [N, Hkv, D] to pool slots [N] (host) and nothing else: of what lies there no summary speaks until
    `write_kv` writes it again. For tokens that may be taken back; NaN and Inf are kept as they are."""
    slots = np.asarray(slots, np.int64)
    check_write(cache.spec, cache.store, (k.shape, v.shape), slots)
    if not len(slots):
        return cache
    units, offsets = (_on(cache, part) for part in np.divmod(slots, cache.store.unit_tokens))
    for pool, rows in ((cache.k, k), (cache.v, v)):
        pages.write(pool[layer], units, offsets, rows.to(DTYPES[cache.spec.dtype]))
    void(cache, layer, slots)
    return cache


def void(cache: Cache, layer: int, slots: np.ndarray) -> None:
    """No summary of the groups of slots [N] counts from there on: on the host, and for kernels."""
    for one in (cache, cache.bound, cache.tail):
        if one is not None and one.store.enabled:
            changed = one.state[layer].void(slots)
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
    """[T, Hkv, G] bool of what T steps visited: of each a selection and which of its sequences, None for everything."""
    every = torch.ones((cache.spec.num_kv_heads, num_groups), dtype=torch.bool, device=cache.device)
    return torch.stack([every if one is None else visit_mask(one[0], num_groups)[one[1]] for one in drafts])
