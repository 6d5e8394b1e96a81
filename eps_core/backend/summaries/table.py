"""Every method of `eps_core.summaries.table` by its name: the module of the same file name."""

import importlib
import math
from functools import cache
from types import ModuleType

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.config.cache import CacheConfig
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.table import FILES


@cache
def method(name: str) -> ModuleType:
    """Return the module of a method over arrays."""
    return importlib.import_module(f"eps_core.backend.summaries.{FILES[name]}")


def build_summary(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    """Return the summaries of full groups: k [.., Hkv, S, D] in cache dtype -> stored arrays [.., Hkv, fields]."""
    summary: Summary = method(cache_config.method).build(ops, cache_config, constants, ops.float32(k))
    return summary


def score_summary(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """Return estimate and bounds [B, Hkv, R, G] of full groups: summary [B, Hkv, G, ..], a = scale * q
    [B, Hkv, R, D]."""
    estimate, lower, upper = method(cache_config.method).score(ops, cache_config, constants, summary, a)
    # an infinite stored scalar (key norms past float16) must loosen a bound, never turn it into NaN
    return (
        ops.where(ops.isfinite(estimate), estimate, LARGEST_ESTIMATE),
        None if lower is None else ops.where(ops.isfinite(lower), lower, -math.inf),
        None if upper is None else ops.where(ops.isfinite(upper), upper, math.inf),
    )
