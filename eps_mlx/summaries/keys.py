"""Codes of groups' means about a centroid: of single keys they bound the groups of any other method."""

import math

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_core.summaries.keys import STEP
from eps_mlx.summaries.base import Score, Summary, key_norm, logit_slack, norms, per_group, up16, widened
from eps_mlx.summaries.rq import levels_of, pack_codes, packed_dots, rotate, scale_of, tree_sum


def build(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    """Return the fields of `eps_core.summaries.keys` of keys k [.., Hkv, S, D] about centroid [Hkv, D] float16."""
    centroid, signs, half = widened(constants["centre"]), constants["signs"], 2 ** (cache_config.bits - 1)
    x = rotate(tree_sum(k) * (1 / k.shape[-2]) - centroid, signs)
    step = STEP[cache_config.bits] * mx.sqrt((x * x).mean(axis=-1, keepdims=True))
    codes = mx.clip(mx.floor(x / mx.where(step > 0, step, 1)) + half, 0, 2 * half - 1).astype(mx.uint8)
    levels = levels_of(codes, cache_config.bits)
    scale = scale_of(x, levels)
    rounded = levels * widened(scale)[..., None]
    far = rotate(k - centroid[..., None, :], signs) - rounded[..., None, :]
    return {
        "codes": pack_codes(codes, cache_config.bits), "scale": scale, "error": up16(norms(x - rounded)),
        "radius": up16(key_norm(far)), "norm": up16(key_norm(k)),
    }  # fmt: skip


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """log n + c.a + x_hat.(H a), which is log n + mu_hat.a, and `ball` about mu_hat."""
    centroid = widened(constants["centre"])
    offset = (a * centroid[:, None, :]).sum(axis=-1)[..., None]
    dots = packed_dots(summary["codes"], cache_config.bits, rotate(a, constants["signs"]))
    mean = math.log(cache_config.S) + (offset + dots * per_group(summary, "scale"))
    size, radius = norms(a)[..., None], per_group(summary, "radius")
    # the centroid is added and taken away again, whatever the size of the keys
    slack = logit_slack(a, per_group(summary, "norm") + radius + norms(centroid)[:, None, None])
    return mean, mean - size * per_group(summary, "error") - slack, mean + size * radius + slack
