"""A seeded uniform ranking that looks at no key and stores nothing: the floor of every plot."""

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_mlx.summaries.base import Score, Summary


def _mixed(x: mx.array) -> mx.array:
    """A bijection of uint32, whose products wrap, that leaves no pattern (C. Wellons' lowbias32)."""
    x = (x ^ x >> 16) * mx.array(0x7FEB352D, mx.uint32)
    x = (x ^ x >> 15) * mx.array(0x846CA68B, mx.uint32)
    return x ^ x >> 16


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """In [0, 1), from seed, layer, kv head, length of the sequence and place in it: a new ranking at every step. Of 24
    bits, so that float32 holds it exactly. No estimate of anything."""
    stream, length, groups = (constants[name].astype(mx.uint32) for name in ("stream", "length", "groups"))
    drawn = _mixed(_mixed(stream[:, :, None] + length) + groups) >> 8  # [B, Hkv, 1, G]
    return drawn.astype(mx.float32) / (1 << 24), None, None
