"""True masses, by reading all of K, which byte counts leave out: what a perfect summary would say."""

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_mlx.summaries.base import Score, Summary, all_dots


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """The masses themselves, from "keys" [B, Hkv, G, S, D]."""
    logits = all_dots(summary["keys"].flatten(2, 3), a)
    return mx.logsumexp(logits.reshape(*logits.shape[:-1], -1, cache_config.S), axis=-1), None, None
