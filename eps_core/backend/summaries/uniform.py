"""A seeded uniform ranking that looks at no key and stores nothing: the floor of every plot."""

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.config.cache import CacheConfig


def _mixed(x: Array) -> Array:
    """A bijection of 32 bits, in int64 of which the upper half is cut off, that leaves no pattern (C. Wellons'
    lowbias32)."""
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ x >> 16


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """In [0, 1), from seed, layer, kv head, length of the sequence and place in it: a new ranking at every step. Of 24
    bits, so that float32 holds it exactly. No estimate of anything."""
    stream, length, groups = (ops.int64(constants[name]) for name in ("stream", "length", "groups"))
    start = _mixed((stream[:, :, None] + length) & 0xFFFFFFFF)  # [B, Hkv, 1, 1]
    drawn = _mixed((start + groups) & 0xFFFFFFFF) >> 8
    return ops.float32(drawn) / (1 << 24), None, None
