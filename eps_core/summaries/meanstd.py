"""TODO"""

import numpy as np

from eps_core.summaries.base import Score, Summary, _f64, _near_codes


def build_meanstd(mean: np.ndarray, std: np.ndarray) -> Summary:
    """Per-channel mean (int8) and population standard deviation (uint8) [D] (UNIQUE, arXiv 2605.27740)."""
    codes, scale = _near_codes(mean, 127)
    std_codes, std_scale = _near_codes(std, 255)
    return {
        "mean": codes.astype(np.int8),
        "mean_scale": scale,
        "std": std_codes.astype(np.uint8),
        "std_scale": std_scale,
    }


def score_meanstd(summary: Summary, a: np.ndarray) -> Score:
    """mu.a + sum_c |a_c| sd_c (UNIQUE): at least mean + one standard deviation of the logits; no bound."""
    mean = _f64(summary, "mean") @ a * _f64(summary, "mean_scale")
    return mean + _f64(summary, "std") @ np.abs(a) * _f64(summary, "std_scale"), None, None
