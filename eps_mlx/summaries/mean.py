"""The mean values that stand for skipped groups: no way to score keys."""

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_mlx.summaries.base import Summary, mean_codes


def build(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    codes, scale = mean_codes(k.mean(axis=-2))
    return {"mean": codes, "mean_scale": scale}
