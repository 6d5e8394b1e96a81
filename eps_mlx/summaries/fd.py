"""Frequent Directions: a sketch of few rows of the keys' Gram matrix."""

import math

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_mlx.summaries import base
from eps_mlx.summaries.base import Score, Summary


def build(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    """Frequent Directions of the whole group at once: |F a|^2 <= |K a|^2 <= |F a|^2 + Delta |a|^2."""
    rows = cache_config.dim or 0
    energies, directions = base.right_singular(k, rows + 1)
    shrinkage = energies[..., rows]
    sketch = mx.sqrt(mx.maximum(energies[..., :rows] - shrinkage[..., None], 0))[..., None] * directions[..., :rows, :]
    codes, scales = base.mean_codes(sketch)
    rounding = sketch - base.widened(codes) * base.widened(scales)[..., None]
    return {
        "rows": codes,
        "row_scale": scales,
        "error": base.up16(mx.sqrt((rounding * rounding).sum(axis=(-1, -2)))),
        "delta": base.up16(mx.sqrt(shrinkage + 1e-5 * energies[..., 0])),
    }


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """|F a| estimates |K a|_2 from below; the bound adds the codes' rounding and the shrinkage Delta |a|^2."""
    log_n = math.log(cache_config.S)
    scales = base.widened(summary["row_scale"])
    batch, kv_heads, groups, rows, head_dim = summary["rows"].shape
    parts = base.all_dots(summary["rows"].reshape(batch, kv_heads, groups * rows, head_dim), a)
    parts = parts.reshape(batch, kv_heads, -1, groups, rows) * scales[..., None, :, :]
    estimate, size = base.norms(parts), base.norms(a)[..., None]
    error, delta = base.per_group(summary, "error"), base.per_group(summary, "delta")
    inside, across = estimate + error * size, delta * size
    bound = mx.sqrt(inside * inside + across * across)
    slack = base.logit_slack(a, error + delta + scales.sum(axis=-1)[..., None, :] * (127 * math.sqrt(head_dim)))
    return estimate, log_n - bound - slack, log_n + bound + slack
