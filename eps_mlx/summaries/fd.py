"""Frequent Directions, as the product requirements name it."""

import math

import mlx.core as mx

from eps_core.config.store import Store
from eps_mlx.summaries.base import (
    Score,
    Summary,
    _dots,
    _norm,
    _per_group,
    _right_singular,
    _wide,
    logit_slack,
    mean_codes,
    up16,
)


def build(store: Store, constants: Summary, k: mx.array) -> Summary:
    """Frequent Directions of the whole group at once: |F a|^2 <= |K a|^2 <= |F a|^2 + Delta |a|^2."""
    rows = store.dim or 0
    energies, directions = _right_singular(k, rows + 1)
    shrinkage = energies[..., rows]
    sketch = mx.sqrt(mx.maximum(energies[..., :rows] - shrinkage[..., None], 0))[..., None] * directions[..., :rows, :]
    codes, scales = mean_codes(sketch)
    rounding = sketch - _wide(codes) * _wide(scales)[..., None]
    return {
        "rows": codes,
        "row_scale": scales,
        "error": up16(mx.sqrt((rounding * rounding).sum(axis=(-1, -2)))),
        "delta": up16(mx.sqrt(shrinkage + 1e-5 * energies[..., 0])),
    }


def score(store: Store, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """|F a| estimates |K a|_2 from below; the bound adds the codes' rounding and the shrinkage Delta |a|^2."""
    log_n = math.log(store.S)
    scales = _wide(summary["row_scale"])
    batch, kv_heads, groups, rows, head_dim = summary["rows"].shape
    parts = _dots(summary["rows"].reshape(batch, kv_heads, groups * rows, head_dim), a)
    parts = parts.reshape(batch, kv_heads, -1, groups, rows) * scales[..., None, :, :]
    estimate, size = _norm(parts), _norm(a)[..., None]
    error, delta = _per_group(summary, "error"), _per_group(summary, "delta")
    inside, across = estimate + error * size, delta * size
    bound = mx.sqrt(inside * inside + across * across)
    slack = logit_slack(a, error + delta + scales.sum(axis=-1)[..., None, :] * (127 * math.sqrt(head_dim)))
    return estimate, log_n - bound - slack, log_n + bound + slack
