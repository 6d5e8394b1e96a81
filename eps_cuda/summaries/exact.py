"""True masses, by reading all of K, which byte counts leave out: what a perfect summary would say."""

import torch
from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_cuda.summaries.base import Score, Summary, all_dots


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """The masses themselves, from "keys" [B, Hkv, G, S, D]."""
    logits = all_dots(summary["keys"].flatten(2, 3), a)
    return torch.logsumexp(logits.unflatten(-1, (-1, cache_config.S)), dim=-1), None, None
