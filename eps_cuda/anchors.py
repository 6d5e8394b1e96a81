"""How the estimates of the query heads of one kv head become one (`SelectionConfig.combine`)."""

import math

import torch
from torch import Tensor

from eps_core.config.selection import ANCHOR_SPREAD, SelectionConfig
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_cuda import pages
from eps_cuda.cache import Cache


def anchors(cache: Cache, layer: int, q: Tensor, units: Tensor, selection_config: SelectionConfig) -> Tensor | None:
    """The anchors [B, Hkv, R] float32 of the query heads q [B, Hq, D] unscaled, where these are summed: the logits of
    the first token of each sequence, which begins with `units` [B, 1], at most `ANCHOR_SPREAD` from their mean."""
    if selection_config.combine == "max":
        return None
    keys = pages.first_rows(cache.k[layer], units[:, 0])
    heads = q.float().unflatten(1, (cache.spec.num_kv_heads, -1))
    logits = (heads * keys[:, :, None]).sum(dim=-1) * (1 / math.sqrt(q.shape[-1]))
    mean = logits.mean(dim=-1, keepdim=True)
    return mean + (logits - mean).clamp(-ANCHOR_SPREAD, ANCHOR_SPREAD)


def combined(estimates: Tensor, anchor: Tensor | None, sums: bool) -> Tensor:
    """One estimate [B, Hkv, G] of those [B, Hkv, R, G] of the query heads, less the anchor [B, Hkv, R] of each where
    there is one: their largest, or the log of the sum of masses. What is not finite stays the largest."""
    if anchor is not None:
        shifted = estimates - anchor[..., None]
        finite = torch.isfinite(shifted) & (estimates < LARGEST_ESTIMATE)
        estimates = torch.where(finite, shifted, LARGEST_ESTIMATE)
    return torch.logsumexp(estimates, dim=2) if sums else estimates.amax(dim=2)
