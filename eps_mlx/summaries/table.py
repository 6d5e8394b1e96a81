"""Every method of `eps_core.summaries.table` by its name: the module of the same file name."""

import importlib
import math
from functools import cache
from types import ModuleType

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.table import FILES
from eps_mlx.summaries.base import Score, Summary


@cache
def method(name: str) -> ModuleType:
    """The module of a method over MLX arrays."""
    return importlib.import_module(f"eps_mlx.summaries.{FILES[name]}")


def build_summary(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    """The summaries of full groups: k [.., Hkv, S, D] in cache dtype -> stored arrays [.., Hkv, fields]."""
    summary: Summary = method(cache_config.method).build(cache_config, constants, k.astype(mx.float32))
    return summary


def score_summary(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """Estimate and bounds [B, Hkv, R, G] of full groups: summary [B, Hkv, G, ..], a = scale * q [B, Hkv, R, D]."""
    estimate, lower, upper = method(cache_config.method).score(cache_config, constants, summary, a)
    # an infinite stored scalar (key norms past float16) must loosen a bound, never turn it into NaN
    return (
        mx.where(mx.isfinite(estimate), estimate, LARGEST_ESTIMATE),
        None if lower is None else mx.where(mx.isfinite(lower), lower, -math.inf),
        None if upper is None else mx.where(mx.isfinite(upper), upper, math.inf),
    )
