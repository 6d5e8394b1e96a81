"""How the estimates of the query heads of one kv head become one (`SelectionConfig.combine`)."""

import math

import mlx.core as mx
import numpy as np

from eps_core.config.selection import ANCHOR_SPREAD, SelectionConfig
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_mlx import pages
from eps_mlx.cache import Cache


def anchors(
    cache: Cache, layer: int, q: mx.array, units: np.ndarray, selection_config: SelectionConfig
) -> mx.array | None:
    """The anchors [B, Hkv, R] float32 of the query heads q [B, Hq, D] unscaled, where these are summed: the logits of
    the first token of each sequence, which begins with `units` [B, 1], at most `ANCHOR_SPREAD` from their mean."""
    if selection_config.combine == "max":
        return None
    kv_heads, per_unit = cache.spec.num_kv_heads, cache.cache_config.unit_tokens
    rows = mx.array(((units * kv_heads + np.arange(kv_heads)) * per_unit).astype(np.int32))
    keys = pages.tiles_of(cache.k[layer], rows, 1)[:, :, 0].astype(mx.float32)
    batch, num_heads, head_dim = q.shape
    heads = q.astype(mx.float32).reshape(batch, kv_heads, num_heads // kv_heads, head_dim)
    logits = (heads * keys[:, :, None]).sum(axis=-1) * (1 / math.sqrt(head_dim))
    mean = logits.mean(axis=-1, keepdims=True)
    return mean + mx.clip(logits - mean, -ANCHOR_SPREAD, ANCHOR_SPREAD)


def combined(estimates: mx.array, anchor: mx.array | None, sums: bool) -> mx.array:
    """One estimate [B, Hkv, G] of those [B, Hkv, R, G] of the query heads, less the anchor [B, Hkv, R] of each where
    there is one: their largest, or the log of the sum of masses. What is not finite stays the largest."""
    if anchor is not None:
        shifted = estimates - anchor[..., None]
        finite = mx.isfinite(shifted) & (estimates < LARGEST_ESTIMATE)
        estimates = mx.where(finite, shifted, LARGEST_ESTIMATE)
    return mx.logsumexp(estimates, axis=2) if sums else estimates.max(axis=2)
