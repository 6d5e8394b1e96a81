"""Quest's box: the least and the largest value of each channel."""

import math

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.backend.summaries.base import Part
from eps_core.config.cache import CacheConfig


def extend(ops: Ops, cache_config: CacheConfig, constants: Summary, earlier: Summary, part: Part) -> Summary:
    low = ops.min(ops.where(part.present, part.keys, math.inf), axis=-2)
    high = ops.max(ops.where(part.present, part.keys, -math.inf), axis=-2)
    norm, continues = ops.key_norm(ops.where(part.present, part.keys, 0)), part.before > 0
    return {
        "min": ops.where(continues, ops.minimum(low, earlier["min"]), low),
        "max": ops.where(continues, ops.maximum(high, earlier["max"]), high),
        "norm": ops.where(continues[..., 0], ops.maximum(norm, earlier["norm"]), norm),
    }


def finalize(ops: Ops, cache_config: CacheConfig, statistics: Summary) -> Summary:
    """Per-channel min and max [.., D] (Quest) in int8, rounded outward; norm [..] = max |k|."""
    low, high = statistics["min"], statistics["max"]
    scale = ops.up16(ops.max(ops.maximum(ops.abs(low), ops.abs(high))) / 127)
    step = ops.float32(scale)[..., None]
    lo, hi = ops.floor(low / step), ops.ceil(high / step)
    # IEEE division cannot round past the code; a GPU's approximate one can
    lo = ops.where(lo * step > low, lo - 1, lo)
    hi = ops.where(hi * step < high, hi + 1, hi)
    return {
        "lo": ops.int8(ops.clip(lo, -128, 127)),
        "hi": ops.int8(ops.clip(hi, -128, 127)),
        "scale": scale,
        "norm": ops.up16(statistics["norm"]),
    }


def build(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    statistics = {"min": ops.min(k, axis=-2), "max": ops.max(k, axis=-2), "norm": ops.key_norm(k)}
    return finalize(ops, cache_config, statistics)


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """sum_c max(a_c lo_c, a_c hi_c): Quest's score, an upper bound of every logit of the group. The largest product
    takes hi where a_c > 0 and lo where a_c < 0, the smallest the other way round."""
    log_n, repeat = math.log(cache_config.S), a.shape[2]
    both = ops.concatenate([ops.clip(a, 0, None), ops.clip(a, None, 0)], axis=2)
    low, high = ops.all_dots(summary["lo"], both), ops.all_dots(summary["hi"], both)
    scale = ops.per_group(summary, "scale")
    most = (high[:, :, :repeat] + low[:, :, repeat:]) * scale
    least = (low[:, :, :repeat] + high[:, :, repeat:]) * scale
    slack = ops.logit_slack(a, ops.per_group(summary, "norm") + 2 * scale * math.sqrt(a.shape[-1]))
    return most, log_n + least - slack, log_n + most + slack
