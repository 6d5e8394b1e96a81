"""How the estimates of the query heads of one kv head become one (`Read.combine`)."""

import math

import torch
from torch import Tensor

from eps_core.config.read import Read
from eps_cuda import pages
from eps_cuda.cache import Cache


def anchors(cache: Cache, layer: int, q: Tensor, units: Tensor, read: Read) -> Tensor | None:
    """The logits [B, Hkv, R] float32 of the first token of each sequence, which begins with `units` [B, 1], where query
    heads are summed: q [B, Hq, D] unscaled."""
    if read.combine == "max":
        return None
    kv_heads, per_unit = cache.spec.num_kv_heads, cache.store.unit_tokens
    rows = (units.long() * kv_heads + torch.arange(kv_heads, device=q.device)) * per_unit
    keys = pages.tiles_of(cache.k[layer], rows, 1)[:, :, 0].float()
    heads = q.float().unflatten(1, (kv_heads, -1))
    return (heads * keys[:, :, None]).sum(dim=-1) * (1 / math.sqrt(q.shape[-1]))


def combined(estimates: Tensor, anchor: Tensor | None, sums: bool) -> Tensor:
    """One estimate [B, Hkv, G] of those [B, Hkv, R, G] of the query heads, less the anchor [B, Hkv, R] of each where
    there is one: their largest, or the log of the sum of masses."""
    if anchor is not None:
        estimates = estimates - anchor[..., None]
    return torch.logsumexp(estimates, dim=2) if sums else estimates.amax(dim=2)
