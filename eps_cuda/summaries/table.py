"""Every method of `eps_core.summaries.table` by its name: the module of the same file name."""

import importlib
import math
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_core.summaries.base import LARGEST_ESTIMATE
from eps_core.summaries.table import FILES
from eps_cuda.summaries.base import Score, Summary


@cache
def method(name: str) -> ModuleType:
    """The module of a method over Torch arrays."""
    return importlib.import_module(f"eps_cuda.summaries.{FILES[name]}")


def build_summary(cache_config: CacheConfig, constants: Summary, k: Tensor) -> Summary:
    """The summaries of full groups: k [.., Hkv, S, D] in cache dtype -> stored arrays [.., Hkv, fields]."""
    summary: Summary = method(cache_config.method).build(cache_config, constants, k.float())
    return summary


def score_summary(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """Estimate and bounds [B, Hkv, R, G] of full groups: summary [B, Hkv, G, ..], a = scale * q [B, Hkv, R, D]."""
    estimate, lower, upper = method(cache_config.method).score(cache_config, constants, summary, a)
    # an infinite stored scalar (key norms past float16) must loosen a bound, never turn it into NaN
    return (
        torch.where(torch.isfinite(estimate), estimate, LARGEST_ESTIMATE),
        None if lower is None else torch.where(torch.isfinite(lower), lower, -math.inf),
        None if upper is None else torch.where(torch.isfinite(upper), upper, math.inf),
    )
