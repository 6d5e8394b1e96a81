"""1PC: the keys' first principal direction and what it leaves."""

import math

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_mlx.summaries import base
from eps_mlx.summaries.base import Score, Summary


def build(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    """Top right singular direction of K in int8; lambda = |K u|^2 and the rest, both with the *quantised* u."""
    codes, scale = base.direction_codes(base.right_singular(k, 1)[1][..., 0, :])
    unit = (codes * scale[..., None])[..., None, :]
    along = (k * unit).sum(axis=-1, keepdims=True)
    # |K|^2 - |K u|^2 as a sum of squares: the difference would cancel where u explains nearly everything
    across = k - along * unit
    return {
        "direction": codes.astype(mx.int8),
        "direction_scale": scale,
        "lam": base.up16(mx.sqrt((along * along).sum(axis=(-1, -2)))),
        "rest": base.up16(mx.sqrt((across * across).sum(axis=(-1, -2)) + 1e-6 * (k * k).sum(axis=(-1, -2)))),
    }


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """B = |K u||u.a| + |K - K u uT|_F sqrt(|a|^2 - (u.a)^2) >= |K a|_2 >= every |logit|."""
    log_n = math.log(cache_config.S)
    along = mx.abs(base.all_dots(summary["direction"], a) * base.per_group(summary, "direction_scale"))
    energy = (a * a).sum(axis=-1)[..., None]
    across = mx.maximum(energy - along * along, 0)
    lam, rest = base.per_group(summary, "lam"), base.per_group(summary, "rest")
    estimate = lam * along + rest * mx.sqrt(across)
    # the difference cancels in float32 where a runs along u: the bound pays for it under the root
    bound = lam * along + rest * mx.sqrt(across + (a.shape[-1] + 32) * 2.0**-22 * energy)
    slack = base.logit_slack(a, lam + rest)
    return estimate, log_n - bound - slack, log_n + bound + slack
