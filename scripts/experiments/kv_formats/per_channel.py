"""KIVI: codes of K by channel, of V by token, the newest tokens as they are (Liu et al. 2024, arXiv 2402.02750,
Algorithm 1, prefill)."""

import numpy as np

from experiments.kv_formats.base import ELEMENT_BYTES, Layer, Rewritten, between, in_place, packed

SOURCE = "KIVI, arXiv 2402.02750, Algorithm 1; scale and zero rounded so that nothing is clipped"
GROUP = 32  # tokens of a channel of K, or channels of a token of V, that share scale and zero


def rewrite(layer: Layer, bits: int, residual: int = 128) -> Rewritten:
    """Codes of `bits`: K in groups of GROUP tokens of one channel, V of GROUP channels of one token (the last may have
    fewer). As they are: the newest T mod `residual` keys and the newest `residual` values; `residual` is a multiple of
    GROUP, else ValueError."""
    if residual < GROUP or residual % GROUP:
        raise ValueError(f"residual {residual} is no multiple of {GROUP} tokens: K's groups would not come out even")
    length, heads, dim = layer.keys.shape
    keys, values = layer.keys.astype(np.float64), layer.values.astype(np.float64)
    old_keys, old_values = length - length % residual, max(length - residual, 0)
    for start in range(0, old_keys, GROUP):
        keys[start : start + GROUP] = between(keys[start : start + GROUP].transpose(1, 2, 0), bits).transpose(2, 0, 1)
    for start in range(0, dim, GROUP):
        values[:old_values, :, start : start + GROUP] = between(values[:old_values, :, start : start + GROUP], bits)
    pair = 2 * ELEMENT_BYTES  # scale and zero
    of_keys = packed(old_keys * dim * bits) + old_keys // GROUP * dim * pair
    of_values = old_values * (packed(dim * bits) + -(-dim // GROUP) * pair)
    as_they_are = (2 * length - old_keys - old_values) * dim * ELEMENT_BYTES
    return in_place(keys, values, heads * (of_keys + of_values + as_they_are))
