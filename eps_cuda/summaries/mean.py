"""The mean values that stand for skipped groups: no way to score keys."""

from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_cuda.summaries.base import Summary, mean_codes


def build(cache_config: CacheConfig, constants: Summary, k: Tensor) -> Summary:
    codes, scale = mean_codes(k.mean(dim=-2))
    return {"mean": codes, "mean_scale": scale}
