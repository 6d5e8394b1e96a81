"""Mean and standard deviation of each channel: not UNIQUE (arXiv 2605.27740), which has one deviation a page."""

from eps_core.attention.protocol import Array
from eps_core.backend.ops import Ops, Score, Summary
from eps_core.backend.summaries.base import Part
from eps_core.config.cache import CacheConfig


def extend(ops: Ops, cache_config: CacheConfig, constants: Summary, earlier: Summary, part: Part) -> Summary:
    before, count = part.before, part.number
    mean = ops.where(part.present, part.keys, 0).sum(axis=-2) / count
    m2 = (ops.where(part.present, part.keys - mean[..., None, :], 0) ** 2).sum(axis=-2)
    # Chan et al. 1979; with nothing before it, the new part stands alone
    gap = mean - ops.where(before > 0, earlier["mean"], mean)
    m2 = m2 + ops.where(before > 0, earlier["m2"], 0) + gap * gap * (before * count / (before + count))
    return {"mean": mean - gap * (before / (before + count)), "m2": m2}


def finalize(ops: Ops, cache_config: CacheConfig, statistics: Summary) -> Summary:
    return _stored(ops, statistics["mean"], ops.sqrt(statistics["m2"] / cache_config.S))


def build(ops: Ops, cache_config: CacheConfig, constants: Summary, k: Array) -> Summary:
    return _stored(ops, k.mean(axis=-2), ops.sqrt(ops.variance(k, axis=-2)))


def _stored(ops: Ops, mean: Array, std: Array) -> Summary:
    """Per-channel mean (int8) and population standard deviation (uint8) [.., D]."""
    mean_scale = ops.near16(ops.max(ops.abs(mean)) / 127)
    std_scale = ops.near16(ops.max(std) / 255)
    return {
        "mean": ops.int8(ops.rounded_codes(mean, mean_scale, 127)),
        "mean_scale": mean_scale,
        "std": ops.uint8(ops.rounded_codes(std, std_scale, 255)),
        "std_scale": std_scale,
    }


def score(ops: Ops, cache_config: CacheConfig, constants: Summary, summary: Summary, a: Array) -> Score:
    """mu.a + sum_c |a_c| sd_c: at least mean + one standard deviation of the logits; no bound."""
    mean = ops.all_dots(summary["mean"], a) * ops.per_group(summary, "mean_scale")
    return mean + ops.all_dots(summary["std"], ops.abs(a)) * ops.per_group(summary, "std_scale"), None, None
