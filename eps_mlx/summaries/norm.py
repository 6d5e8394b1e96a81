"""The scalar fallback: the largest key norm and the Frobenius norm of a group, four bytes."""

import math

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_mlx.summaries.base import Score, Summary, key_norm, logit_slack, norms, per_group, up16


def build(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    """max |k_i| and |K|_F, both rounded up."""
    return {"largest": up16(key_norm(k)), "frobenius": up16(mx.sqrt((k * k).sum(axis=(-1, -2))))}


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """|a| |K|_F >= |K a|_2, whatever the direction of a: it ranks groups alike for every query. Of logits at most
    |a| max |k_i| the mass is at most n times e to that; Jensen with |mu| <= |K|_F / sqrt(n) gives the lower bound."""
    size, n, log_n = norms(a)[..., None], cache_config.S, math.log(cache_config.S)
    largest, frobenius = size * per_group(summary, "largest"), size * per_group(summary, "frobenius")
    slack = logit_slack(a, per_group(summary, "largest"))
    return frobenius, log_n - frobenius / math.sqrt(n) - slack, log_n + largest + slack
