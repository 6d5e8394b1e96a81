"""AETHER's ball: the mean, and the radius about it."""

import math

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.config.cache import CacheConfig


def build(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    """Mean in int8 and the radius about the *rounded* mean (AETHER's ball bound)."""
    mean = k.mean(axis=-2)
    codes, scale = ops.mean_codes(mean)
    rounded = ops.float32(codes) * ops.float32(scale)[..., None]
    return {
        "mean": codes,
        "mean_scale": scale,
        "error": ops.up16(ops.norms(mean - rounded)),
        "radius": ops.up16(ops.key_norm(k - rounded[..., None, :])),
        "norm": ops.up16(ops.key_norm(k)),
    }


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """mu_hat.a + |a| radius >= every logit; Jensen about the true mean gives the lower bound."""
    log_n = math.log(cache_config.S)
    mean, size = ops.all_dots(summary["mean"], a) * ops.per_group(summary, "mean_scale"), ops.norms(a)[..., None]
    radius, error = ops.per_group(summary, "radius"), ops.per_group(summary, "error")
    slack = ops.logit_slack(a, ops.per_group(summary, "norm") + radius)
    estimate = mean + size * radius
    return estimate, log_n + mean - size * error - slack, log_n + estimate + slack
