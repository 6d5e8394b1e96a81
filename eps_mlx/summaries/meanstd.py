"""TODO"""

import mlx.core as mx

from eps_mlx.summaries.base import Score, Summary, _codes, _dots, _per_group, near16


def build_meanstd(mean: mx.array, std: mx.array) -> Summary:
    """Per-channel mean (int8) and population standard deviation (uint8) [.., D] (UNIQUE)."""
    mean_scale = near16(mx.abs(mean).max(axis=-1) / 127)
    std_scale = near16(std.max(axis=-1) / 255)
    return {
        "mean": _codes(mean, mean_scale, 127).astype(mx.int8),
        "mean_scale": mean_scale,
        "std": _codes(std, std_scale, 255).astype(mx.uint8),
        "std_scale": std_scale,
    }


def score_meanstd(summary: Summary, a: mx.array) -> Score:
    """mu.a + sum_c |a_c| sd_c (UNIQUE): at least mean + one standard deviation of the logits; no bound."""
    mean = _dots(summary["mean"], a) * _per_group(summary, "mean_scale")
    return mean + _dots(summary["std"], mx.abs(a)) * _per_group(summary, "std_scale"), None, None
