"""Mean and standard deviation of each channel: not UNIQUE (arXiv 2605.27740), which has one deviation a page."""

import mlx.core as mx

from eps_core.config.cache import CacheConfig
from eps_mlx.summaries.base import Part, Score, Summary, all_dots, near16, per_group, rounded_codes


def extend(cache_config: CacheConfig, constants: Summary, earlier: Summary, part: Part) -> Summary:
    before, count = part.before, part.number
    mean = mx.where(part.present, part.keys, 0).sum(axis=-2) / count
    m2 = (mx.where(part.present, part.keys - mean[..., None, :], 0) ** 2).sum(axis=-2)
    # Chan et al. 1979; with nothing before it, the new part stands alone
    gap = mean - mx.where(before > 0, earlier["mean"], mean)
    m2 = m2 + mx.where(before > 0, earlier["m2"], 0) + gap * gap * (before * count / (before + count))
    return {"mean": mean - gap * (before / (before + count)), "m2": m2}


def finalize(cache_config: CacheConfig, statistics: Summary) -> Summary:
    return _stored(statistics["mean"], mx.sqrt(statistics["m2"] / cache_config.S))


def build(cache_config: CacheConfig, constants: Summary, k: mx.array) -> Summary:
    return _stored(k.mean(axis=-2), mx.sqrt(k.var(axis=-2)))


def _stored(mean: mx.array, std: mx.array) -> Summary:
    """Per-channel mean (int8) and population standard deviation (uint8) [.., D]."""
    mean_scale = near16(mx.abs(mean).max(axis=-1) / 127)
    std_scale = near16(std.max(axis=-1) / 255)
    return {
        "mean": rounded_codes(mean, mean_scale, 127).astype(mx.int8),
        "mean_scale": mean_scale,
        "std": rounded_codes(std, std_scale, 255).astype(mx.uint8),
        "std_scale": std_scale,
    }


def score(cache_config: CacheConfig, constants: Summary, summary: Summary, a: mx.array) -> Score:
    """mu.a + sum_c |a_c| sd_c: at least mean + one standard deviation of the logits; no bound."""
    mean = all_dots(summary["mean"], a) * per_group(summary, "mean_scale")
    return mean + all_dots(summary["std"], mx.abs(a)) * per_group(summary, "std_scale"), None, None
