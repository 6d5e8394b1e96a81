"""True masses, by reading all of K, which byte counts leave out: what a perfect summary would say."""

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.config.cache import CacheConfig


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """The masses themselves, from "keys" [B, Hkv, G, S, D]."""
    logits = ops.all_dots(summary["keys"].flatten(2, 3), a)
    return ops.logsumexp(logits.reshape(*logits.shape[:-1], -1, cache_config.S), axis=-1), None, None
