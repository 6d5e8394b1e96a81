"""AETHER's ball: the mean, and the radius about it."""

import math

from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_cuda.summaries.base import Score, Summary, all_dots, key_norm, logit_slack, mean_codes, norms, per_group, up16


def build(cache_config: CacheConfig, constants: Summary, k: Tensor) -> Summary:
    """Mean in int8 and the radius about the *rounded* mean (AETHER's ball bound)."""
    mean = k.mean(dim=-2)
    codes, scale = mean_codes(mean)
    rounded = codes.float() * scale.float()[..., None]
    return {
        "mean": codes,
        "mean_scale": scale,
        "error": up16(norms(mean - rounded)),
        "radius": up16(key_norm(k - rounded[..., None, :])),
        "norm": up16(key_norm(k)),
    }


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """mu_hat.a + |a| radius >= every logit; Jensen about the true mean gives the lower bound."""
    log_n = math.log(cache_config.S)
    mean, size = all_dots(summary["mean"], a) * per_group(summary, "mean_scale"), norms(a)[..., None]
    radius, error = per_group(summary, "radius"), per_group(summary, "error")
    slack = logit_slack(a, per_group(summary, "norm") + radius)
    estimate = mean + size * radius
    return estimate, log_n + mean - size * error - slack, log_n + estimate + slack
