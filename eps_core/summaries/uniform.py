"""A seeded uniform ranking that looks at no key and stores nothing: the floor of every plot."""

import numpy as np

from eps_core.summaries.base import Constants, MethodSpec, Score, Settings, Summary

SPEC = MethodSpec(group_size=16, role="evaluation", colour=9, by_place=True, no_bounds="none: it looks at no key")


def constants(settings: Settings, layer: int, num_kv_heads: int, head_dim: int) -> Constants:
    """Return where each kv head starts: "stream" [Hkv, 1], 32 random bits."""
    return {"stream": np.random.default_rng([settings.seed, 3, layer]).integers(0, 1 << 32, (num_kv_heads, 1))}


def _mixed(x: int) -> int:
    """A bijection of 32 bits that leaves no pattern (C. Wellons' lowbias32)."""
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ x >> 16


def score(settings: Settings, constants: Constants, summary: Summary, a: np.ndarray) -> Score:
    """In [0, 1), from seed, layer, kv head, length of the sequence and place in it: a new ranking at every step. Of 24
    bits, so that float32 holds it exactly. No estimate of anything."""
    start = _mixed(int(constants["stream"][0] + constants["length"]) & 0xFFFFFFFF)
    drawn = [_mixed((start + int(group)) & 0xFFFFFFFF) >> 8 for group in constants["groups"]]
    return np.array(drawn) / (1 << 24), None, None
