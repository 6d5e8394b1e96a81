"""Codes of groups' means about a centroid: of single keys they bound the groups of any other method."""

import math

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.backend.summaries.rq import levels_of, pack_codes, rotate, scale_of, tree_sum
from eps_core.config.cache import CacheConfig
from eps_core.summaries.keys import STEP


def build(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    """Return the fields of `eps_core.summaries.keys` of keys k [.., Hkv, S, D] about centroid [Hkv, D] float16."""
    centroid, signs, half = ops.float32(constants["centre"]), constants["signs"], 2 ** (cache_config.bits - 1)
    x = rotate(ops, tree_sum(ops, k) * (1 / k.shape[-2]) - centroid, signs)
    step = STEP[cache_config.bits] * ops.sqrt((x * x).mean(axis=-1, keepdims=True))
    codes = ops.uint8(ops.clip(ops.floor(x / ops.where(step > 0, step, 1)) + half, 0, 2 * half - 1))
    levels = levels_of(ops, codes, cache_config.bits)
    scale = scale_of(ops, x, levels)
    rounded = levels * ops.float32(scale)[..., None]
    far = rotate(ops, k - centroid[..., None, :], signs) - rounded[..., None, :]
    return {
        "codes": pack_codes(ops, codes, cache_config.bits), "scale": scale, "error": ops.up16(ops.norms(x - rounded)),
        "radius": ops.up16(ops.key_norm(far)), "norm": ops.up16(ops.key_norm(k)),
    }  # fmt: skip


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """log n + c.a + x_hat.(H a), which is log n + mu_hat.a, and `ball` about mu_hat."""
    centroid = ops.float32(constants["centre"])
    offset = (a * centroid[:, None, :]).sum(axis=-1)[..., None]
    dots = ops.packed_dots(summary["codes"], cache_config.bits, rotate(ops, a, constants["signs"]))
    mean = math.log(cache_config.S) + (offset + dots * ops.per_group(summary, "scale"))
    size, radius = ops.norms(a)[..., None], ops.per_group(summary, "radius")
    # the centroid is added and taken away again, whatever the size of the keys
    slack = ops.logit_slack(a, ops.per_group(summary, "norm") + radius + ops.norms(centroid)[:, None, None])
    return mean, mean - size * ops.per_group(summary, "error") - slack, mean + size * radius + slack
