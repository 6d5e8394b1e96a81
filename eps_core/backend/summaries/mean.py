"""The mean values that stand for skipped groups: no way to score keys."""

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Summary
from eps_core.config.cache import CacheConfig


def build(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    codes, scale = ops.mean_codes(k.mean(axis=-2))
    return {"mean": codes, "mean_scale": scale}
