"""1PC: the keys' first principal direction and what it leaves."""

import math

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.backend.summaries import base
from eps_core.config.cache import CacheConfig


def build(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    """Top right singular direction of K in int8; lambda = |K u|^2 and the rest, both with the *quantised* u."""
    codes, scale = base.direction_codes(ops, base.right_singular(ops, k, 1)[1][..., 0, :])
    unit = (codes * scale[..., None])[..., None, :]
    along = (k * unit).sum(axis=-1, keepdims=True)
    # |K|^2 - |K u|^2 as a sum of squares: the difference would cancel where u explains nearly everything
    across = k - along * unit
    return {
        "direction": ops.int8(codes),
        "direction_scale": scale,
        "lam": ops.up16(base.frobenius(ops, along)),
        "rest": ops.up16(ops.sqrt((across * across).sum(axis=(-1, -2)) + 1e-6 * (k * k).sum(axis=(-1, -2)))),
    }


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """B = |K u||u.a| + |K - K u uT|_F sqrt(|a|^2 - (u.a)^2) >= |K a|_2 >= every |logit|."""
    log_n = math.log(cache_config.S)
    along = ops.abs(ops.all_dots(summary["direction"], a) * ops.per_group(summary, "direction_scale"))
    energy = (a * a).sum(axis=-1)[..., None]
    across = ops.clip(energy - along * along, 0, None)
    lam, rest = ops.per_group(summary, "lam"), ops.per_group(summary, "rest")
    estimate = lam * along + rest * ops.sqrt(across)
    # the difference cancels in float32 where a runs along u: the bound pays for it under the root
    bound = lam * along + rest * ops.sqrt(across + (a.shape[-1] + 32) * 2.0**-22 * energy)
    slack = ops.logit_slack(a, lam + rest)
    return estimate, log_n - bound - slack, log_n + bound + slack
