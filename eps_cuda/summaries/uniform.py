"""A seeded uniform ranking that looks at no key and stores nothing: the floor of every plot."""

from torch import Tensor

from eps_core.config.cache import CacheConfig
from eps_cuda.summaries.base import Score, Summary


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32 bits, in int64 of which the upper half is cut off, that leaves no pattern (C. Wellons'
    lowbias32)."""
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ x >> 16


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: Tensor) -> Score:
    """In [0, 1), from seed, layer, kv head, length of the sequence and place in it: a new ranking at every step. Of 24
    bits, so that float32 holds it exactly. No estimate of anything."""
    start = _mixed((constants["stream"][:, :, None] + constants["length"]) & 0xFFFFFFFF)  # [B, Hkv, 1, 1]
    drawn = _mixed((start + constants["groups"]) & 0xFFFFFFFF) >> 8
    return drawn.float() / (1 << 24), None, None
