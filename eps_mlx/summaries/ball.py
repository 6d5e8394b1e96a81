"""AETHER's ball: the mean, and the radius about it."""

import math

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_mlx.summaries import base
from eps_mlx.summaries.base import Score, Summary


def build(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    """Mean in int8 and the radius about the *rounded* mean (AETHER's ball bound)."""
    mean = k.mean(axis=-2)
    codes, scale = base.mean_codes(mean)
    rounded = base.widened(codes) * base.widened(scale)[..., None]
    return {
        "mean": codes,
        "mean_scale": scale,
        "error": base.up16(base.norms(mean - rounded)),
        "radius": base.up16(base.key_norm(k - rounded[..., None, :])),
        "norm": base.up16(base.key_norm(k)),
    }


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """mu_hat.a + |a| radius >= every logit; Jensen about the true mean gives the lower bound."""
    log_n = math.log(cache_config.S)
    mean, size = base.all_dots(summary["mean"], a) * base.per_group(summary, "mean_scale"), base.norms(a)[..., None]
    radius, error = base.per_group(summary, "radius"), base.per_group(summary, "error")
    slack = base.logit_slack(a, base.per_group(summary, "norm") + radius)
    estimate = mean + size * radius
    return estimate, log_n + mean - size * error - slack, log_n + estimate + slack
