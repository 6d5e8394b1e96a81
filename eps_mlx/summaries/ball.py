"""AETHER's ball: the mean, and the radius about it."""

import math

import mlx.core as mx

from eps_core.config.store import Store
from eps_mlx.summaries.base import (
    Score,
    Summary,
    _dots,
    _key_norm,
    _norm,
    _per_group,
    _wide,
    logit_slack,
    mean_codes,
    up16,
)


def build(store: Store, constants: Summary, k: mx.array) -> Summary:
    """Mean in int8 and the radius about the *rounded* mean (AETHER's ball bound)."""
    mean = k.mean(axis=-2)
    codes, scale = mean_codes(mean)
    rounded = _wide(codes) * _wide(scale)[..., None]
    return {
        "mean": codes,
        "mean_scale": scale,
        "error": up16(_norm(mean - rounded)),
        "radius": up16(_key_norm(k - rounded[..., None, :])),
        "norm": up16(_key_norm(k)),
    }


def score(store: Store, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """mu_hat.a + |a| radius >= every logit; Jensen about the true mean gives the lower bound."""
    log_n = math.log(store.S)
    mean, size = _dots(summary["mean"], a) * _per_group(summary, "mean_scale"), _norm(a)[..., None]
    radius, error = _per_group(summary, "radius"), _per_group(summary, "error")
    slack = logit_slack(a, _per_group(summary, "norm") + radius)
    estimate = mean + size * radius
    return estimate, log_n + mean - size * error - slack, log_n + estimate + slack
