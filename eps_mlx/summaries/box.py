"""Quest's box: the least and the largest value of each channel."""

import math

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_mlx.summaries.base import Part, Score, Summary, all_dots, key_norm, logit_slack, per_group, up16, widened


def extend(cache_config: CacheConfig, constants: Summary, earlier: Summary, part: Part) -> Summary:
    low = mx.where(part.present, part.keys, mx.inf).min(axis=-2)
    high = mx.where(part.present, part.keys, -mx.inf).max(axis=-2)
    norm, continues = key_norm(mx.where(part.present, part.keys, 0)), part.before > 0
    return {
        "min": mx.where(continues, mx.minimum(low, earlier["min"]), low),
        "max": mx.where(continues, mx.maximum(high, earlier["max"]), high),
        "norm": mx.where(continues[..., 0], mx.maximum(norm, earlier["norm"]), norm),
    }


def finalize(cache_config: CacheConfig, statistics: Summary) -> Summary:
    """Per-channel min and max [.., D] (Quest) in int8, rounded outward; norm [..] = max |k|."""
    low, high = statistics["min"], statistics["max"]
    scale = up16(mx.maximum(mx.abs(low), mx.abs(high)).max(axis=-1) / 127)
    step = widened(scale)[..., None]
    lo, hi = mx.floor(low / step), mx.ceil(high / step)
    # IEEE division cannot round past the code; a GPU's approximate one can
    lo = mx.where(lo * step > low, lo - 1, lo)
    hi = mx.where(hi * step < high, hi + 1, hi)
    return {
        "lo": mx.clip(lo, -128, 127).astype(mx.int8),
        "hi": mx.clip(hi, -128, 127).astype(mx.int8),
        "scale": scale,
        "norm": up16(statistics["norm"]),
    }


def build(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    return finalize(cache_config, {"min": k.min(axis=-2), "max": k.max(axis=-2), "norm": key_norm(k)})


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """sum_c max(a_c lo_c, a_c hi_c): Quest's score, an upper bound of every logit of the group. As two products:
    a.mid +- |a|.half, in code units."""
    log_n = math.log(cache_config.S)
    lo, hi = widened(summary["lo"]), widened(summary["hi"])
    scale = per_group(summary, "scale")
    middle = all_dots((lo + hi) * 0.5, a) * scale
    half = all_dots((hi - lo) * 0.5, mx.abs(a)) * scale
    slack = logit_slack(a, per_group(summary, "norm") + 2 * scale * math.sqrt(a.shape[-1]))
    return middle + half, log_n + middle - half - slack, log_n + middle + half + slack
