"""Frequent Directions: a sketch of few rows of the keys' Gram matrix."""

import math

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.backend.summaries import base
from eps_core.config.cache import CacheConfig


def build(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    """Frequent Directions of the whole group at once: |F a|^2 <= |K a|^2 <= |F a|^2 + Delta |a|^2."""
    rows = cache_config.dim or 0
    energies, directions = base.right_singular(ops, k, rows + 1)
    shrinkage = energies[..., rows]
    lengths = ops.sqrt(ops.clip(energies[..., :rows] - shrinkage[..., None], 0, None))
    sketch = lengths[..., None] * directions[..., :rows, :]
    codes, scales = ops.mean_codes(sketch)
    rounding = sketch - ops.float32(codes) * ops.float32(scales)[..., None]
    return {
        "rows": codes,
        "row_scale": scales,
        "error": ops.up16(base.frobenius(ops, rounding)),
        "delta": ops.up16(ops.sqrt(shrinkage + 1e-5 * energies[..., 0])),
    }


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """|F a| estimates |K a|_2 from below; the bound adds the codes' rounding and the shrinkage Delta |a|^2."""
    log_n = math.log(cache_config.S)
    scales = ops.float32(summary["row_scale"])
    batch, kv_heads, groups, rows, head_dim = summary["rows"].shape
    parts = ops.all_dots(summary["rows"].reshape(batch, kv_heads, groups * rows, head_dim), a)
    parts = parts.reshape(batch, kv_heads, -1, groups, rows) * scales[..., None, :, :]
    estimate, size = ops.norms(parts), ops.norms(a)[..., None]
    error, delta = ops.per_group(summary, "error"), ops.per_group(summary, "delta")
    inside, across = estimate + error * size, delta * size
    bound = ops.sqrt(inside * inside + across * across)
    slack = ops.logit_slack(a, error + delta + scales.sum(axis=-1)[..., None, :] * (127 * math.sqrt(head_dim)))
    return estimate, log_n - bound - slack, log_n + bound + slack
